"""The choice of a pool: a job tries its pools in the order of preference, each for its `wait`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep_operator.api.checkpoint import CheckpointPolicy
from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase
from everstep_operator.plan.plan_context import FORMING_PHASES, RESOLVED_ANEW, PlanContext

_WAITING_PHASES = FORMING_PHASES | {Phase.RESTARTING}
FINAL_PROBLEMS = frozenset({Reason.NAMESPACE_NOT_ALLOWED, Reason.NO_ON_DEMAND_POOL})


@dataclass(frozen=True)
class PoolSelection:
    """The pools of a set, or why there are none yet.

    Attributes:
        pool: The pool of the set; None: the job names none.
        on_demand: The pool of the first `minOnDemand` pods, where it is another one.
        problem: Why there is none.
    """

    pool: TrainingPool | None = None
    on_demand: TrainingPool | None = None
    problem: tuple[Reason, str] | None = None


def select_first_pool(s: PlanContext) -> PoolSelection:
    """Return the pools to start with."""
    if not s.spec.pools:
        return PoolSelection()
    return _select_from(s, [p.name for p in s.spec.pools])


def select_next_pool(s: PlanContext) -> tuple[PoolSelection | None, float | None]:
    """Return the pools to go to now, and when to ask again.

    A job that has run moves only if its checkpoints are not where its pods are. It may come back to a pool before: a
    stockout there has passed, perhaps. Of a set in two pools, the part that lacks nodes moves.
    """
    names = [p.name for p in s.spec.pools]
    if s.template is None or s.phase not in _WAITING_PHASES or s.all_bound or s.template.pool not in names:
        return None, None
    if s.has_run and not _keeps_checkpoints(s.spec.checkpoint):
        return None, None
    # Pods that a queue keeps back have not asked for a node.
    gated_at = s.observed.gated_at or 0.0
    since = max(_pool_tried_since(s), s.since(_WAITING_PHASES) if s.has_run else 0.0, gated_at)
    looks = []
    for name, bound, wanted in _count_by_pool(s):
        if bound == wanted or name not in names:
            continue
        at = names.index(name)
        ahead = [*names[at + 1 :], *(names[:at] if s.has_run else [])]
        if name == s.template.on_demand_pool:
            choice = _select_from(s, [s.template.pool], ahead)
        else:
            choice = _select_from(s, ahead, [s.template.on_demand_pool, *names])
        if choice.pool is None:
            continue
        due = since + s.spec.pools[at].wait.total_seconds()
        if s.now >= due:
            return choice, None
        looks.append(due)
    return None, min(looks, default=None)


def describe_move(s: PlanContext, choice: PoolSelection) -> str:
    """Return a message about pools that lack nodes, and those that are tried next."""
    before = s.template.pools if s.template is not None else ()
    chosen = [each.metadata.name for each in (choice.pool, choice.on_demand) if each is not None]
    new = [name for name in chosen if name not in before] or chosen[:1]
    short = " and ".join(
        f"TrainingPool {name!r} had nodes for {bound} of {wanted} pods"
        for name, bound, wanted in _count_by_pool(s)
        if bound < wanted
    )
    return f"{short}; {' and '.join(map(repr, new))} is the next pool to try"


def describe_shortage(s: PlanContext) -> str | None:
    """Return which pools have nodes for how many pods, with the scheduler's message; None unless it has found none for
    some."""
    waiting = next((pod for pod in s.live if pod.unschedulable and not pod.gated), None)
    if waiting is None:
        return None
    short = []
    for name, bound, wanted in _count_by_pool(s):
        pool = s.observed.pools.get(name)
        kind = f" ({pool.spec.capacity_type})" if pool is not None else ""
        where = f"TrainingPool {name!r}{kind} has" if name else "the cluster has"
        short += [f"{where} nodes for {bound} of {wanted} pods"] if bound < wanted else []
    return f"{', '.join(short)}: {waiting.unschedulable}"


def _count_by_pool(s: PlanContext) -> list[tuple[str, int, int]]:
    """Return of each pool of the set its name, the pods with a node, and those that are to have one."""
    if s.template is None:
        return []
    first = s.num_on_demand
    bound = [pod.index for pod in s.live if pod.scheduled]
    rest = (s.template.pool, sum(1 for index in bound if index >= first), s.wanted - first)
    return [(s.template.on_demand_pool, len(bound) - rest[1], first), rest] if first else [rest]


def _keeps_checkpoints(policy: CheckpointPolicy | None) -> bool:
    """Return whether checkpoints outlive the pods and the nodes of a job."""
    if policy is None:
        return False
    volume = policy.volume
    lasts = volume is not None and (volume.persistent_volume_claim or volume.nfs or volume.csi)
    return policy.store is not None or bool(lasts)


def _select_from(s: PlanContext, names: Sequence[str], on_demand: Sequence[str] | None = None) -> PoolSelection:
    """Return the first pool of `names` that can be used, and what `minOnDemand` needs beside it.

    Args:
        s: The job.
        names: Names of pools, the preferred one first.
        on_demand: Names of those for the first pods, likewise; None: all of the job's.
    """
    least = s.spec.min_on_demand
    usable, problems = _sort_pools(s, names)
    if least >= s.wanted:
        usable = [pool for pool in usable if pool.is_on_demand]
    if usable and (least == 0 or usable[0].is_on_demand):
        return PoolSelection(usable[0])
    if usable or least:
        first, more = _sort_pools(s, [p.name for p in s.spec.pools] if on_demand is None else on_demand)
        first = [pool for pool in first if pool.is_on_demand]
        if usable and first:
            return PoolSelection(usable[0], first[0])
        text = f"minOnDemand is {least}, and none of the TrainingPools {', '.join(names)} has capacityType on-demand"
        problems = [*(problems if usable else ()), *more, (Reason.NO_ON_DEMAND_POOL, text)]
    # A pool that does not exist may come yet (GitOps applies in any order); one that refuses has decided.
    problems.sort(key=lambda problem: problem[0] in FINAL_PROBLEMS)
    return PoolSelection(problem=problems[0]) if problems else PoolSelection()


def _sort_pools(s: PlanContext, names: Sequence[str]) -> tuple[list[TrainingPool], list[tuple[Reason, str]]]:
    """Return the pools that the job can use, and why it cannot use the others."""
    usable, problems = [], []
    namespace = s.job.metadata.namespace or "default"
    for name in dict.fromkeys(filter(None, names)):
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
            usable.append(pool)
    return usable, problems


def _pool_tried_since(s: PlanContext) -> float:
    """Return when the present pool was chosen. If that is no longer on record, longer ago than all that is."""
    known = s.status.transitions
    chosen = next((t for t in reversed(known) if t.reason in RESOLVED_ANEW), known[0] if known else None)
    return chosen.start.timestamp() if chosen is not None else s.now
