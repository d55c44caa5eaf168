"""The choice of a pool: a job tries its pools in the order of preference, each for its `wait`."""

from __future__ import annotations

from dataclasses import dataclass

from everstep_operator.api.checkpoint import CheckpointPolicy
from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase
from everstep_operator.plan.plan_context import FORMING_PHASES, PlanContext

_WAITING_PHASES = FORMING_PHASES | {Phase.RESTARTING}
_RESOLVED_ANEW = frozenset({Reason.CREATED.value, Reason.RESUMED.value, Reason.NEXT_POOL.value})


@dataclass(frozen=True)
class PoolSelection:
    """A pool (None: the job names none), or why there is none yet."""

    pool: TrainingPool | None = None
    problem: tuple[Reason, str] | None = None


def select_first_pool(s: PlanContext) -> PoolSelection:
    """Return the pool to start with."""
    if not s.spec.pools:
        return PoolSelection()
    return _select_from(s, [p.name for p in s.spec.pools])


def select_next_pool(s: PlanContext) -> tuple[TrainingPool | None, float | None]:
    """Return the pool to go to now, and when to ask again.

    A job that has run moves only if its checkpoints are not where its pods are. It may come back to a pool before: a
    stockout there has passed, perhaps.
    """
    names = [p.name for p in s.spec.pools]
    if s.template is None or s.phase not in _WAITING_PHASES or s.all_bound or s.template.pool not in names:
        return None, None
    if s.has_run and not _keeps_checkpoints(s.spec.checkpoint):
        return None, None
    at = names.index(s.template.pool)
    choice = _select_from(s, [*names[at + 1 :], *(names[:at] if s.has_run else [])])
    if choice.pool is None:
        return None, None
    since = max(_pool_tried_since(s), s.since(_WAITING_PHASES) if s.has_run else 0.0)
    due = since + s.spec.pools[at].wait.total_seconds()
    return (choice.pool, None) if s.now >= due else (None, due)


def _keeps_checkpoints(policy: CheckpointPolicy | None) -> bool:
    """Return whether checkpoints outlive the pods and the nodes of a job."""
    if policy is None:
        return False
    volume = policy.volume
    lasts = volume is not None and (volume.persistent_volume_claim or volume.nfs or volume.csi)
    return policy.store is not None or bool(lasts)


def _select_from(s: PlanContext, names: list[str]) -> PoolSelection:
    problems = []
    namespace = s.job.metadata.namespace or "default"
    for name in names:
        pool = s.observed.pools.get(name)
        if pool is None:
            problems.append((Reason.POOL_NOT_FOUND, f"there is no TrainingPool {name!r}"))
        elif not pool.allows(namespace):
            text = f"TrainingPool {name!r} does not allow the namespace {namespace!r}"
            problems.append((Reason.NAMESPACE_NOT_ALLOWED, text))
        elif pool.unknown_fields:
            text = f"TrainingPool {name!r} has {', '.join(pool.unknown_fields)}: {Reason.UNKNOWN_FIELDS.meaning}"
            problems.append((Reason.UNKNOWN_FIELDS, text))
        else:
            return PoolSelection(pool)
    # A pool that does not exist may come yet (GitOps applies in any order); one that refuses has decided.
    problems.sort(key=lambda problem: problem[0] is Reason.NAMESPACE_NOT_ALLOWED)
    return PoolSelection(problem=problems[0]) if problems else PoolSelection()


def _pool_tried_since(s: PlanContext) -> float:
    """Return when the present pool was chosen. If that is no longer on record, longer ago than all that is."""
    known = s.status.transitions
    chosen = next((t for t in reversed(known) if t.reason in _RESOLVED_ANEW), known[0] if known else None)
    return chosen.start.timestamp() if chosen is not None else s.now
