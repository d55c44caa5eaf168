"""The limits of time after which a job fails.

All clocks come from the status and the pods, so they survive restarts of the operator and stand still while the job is
suspended. They begin when an operator has looked: that there was none is no fault of a job.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import ConditionType, Phase
from everstep_operator.plan import pod_replacement
from everstep_operator.plan.gang import blocked_by
from everstep_operator.plan.plan_context import FORMING_PHASES, RUN_PHASES, PlanContext

SCHEDULER_SILENCE_SECONDS = 60.0  # of a pod of which no scheduler has said anything; they say at once what they lack
_REJECTED = (Reason.ADMISSION_REJECTED.value, Reason.NOT_PERMITTED.value)


def find_expired_limit(s: PlanContext) -> tuple[Reason, str] | None:
    """Return (reason, message) of the first limit that has passed, or None."""
    for reason, at, describe in _list_deadlines(s):
        if at is not None and s.now >= at:
            return reason, describe()
    return None


def next_deadline(s: PlanContext) -> float | None:
    """Return when to look again because of a limit."""
    return min((at for _, at, _ in _list_deadlines(s) if at is not None), default=None)


def waiting_since(s: PlanContext) -> float:
    """Return from when the wait for capacity counts: the first look, the last resume, or the end of the last run.

    Ready tells the first and the last of these: transitions are few, and a job that gives its nodes back and takes them
    again has soon filled them.
    """
    ready, suspended = s.status.condition(ConditionType.READY), s.status.condition(ConditionType.SUSPENDED)
    if ready is None or ready.status == "True":
        return s.now
    at = max(s.created, ready.last_transition_time.timestamp())
    if suspended is not None and suspended.status == "False":
        at = max(at, suspended.last_transition_time.timestamp())
    return at


def seconds_run(s: PlanContext) -> float:
    """Return the seconds since the first start, less the time pending or suspended."""
    timings, open_ = s.status.timings, s.open
    total = timings.running + timings.recovering
    if open_ is not None and open_.phase in RUN_PHASES:
        total += max(0.0, s.now - open_.start.timestamp())
    return total


def _list_deadlines(s: PlanContext) -> list[tuple[Reason, float | None, Callable[[], str]]]:
    """Return each limit with when it passes, and with a function that says so: to know what keeps the pods from
    starting is to look at all of them."""
    limits = s.spec.timeouts
    pending, startup = limits.pending.total_seconds(), limits.startup.total_seconds()
    runtime = limits.runtime.total_seconds()
    return [
        (
            Reason.RUNTIME_TIMEOUT,
            _runtime_deadline(s, runtime),
            lambda: f"the job ran for {runtime:.0f} s (timeouts.runtime)",
        ),
        (
            Reason.STARTUP_TIMEOUT,
            _startup_deadline(s, startup),
            lambda: f"not all ranks started in {startup:.0f} s{_add_text(describe_container_wait(s))}",
        ),
        (
            Reason.PENDING_TIMEOUT,
            _pending_deadline(s, pending, startup),
            lambda: f"no place for all pods in {pending:.0f} s{_describe_unschedulable(s)}",
        ),
    ]


def _runtime_deadline(s: PlanContext, limit: float) -> float | None:
    return s.now + limit - seconds_run(s) if s.phase in RUN_PHASES else None


def _pending_deadline(s: PlanContext, limit: float, startup: float) -> float | None:
    if s.job.unknown_fields or (held_up := _rejected_until(s)) is None:
        return None
    # Nor does a pod wait for capacity while a queue keeps it from the scheduler, over a weekend as it may be.
    held_up = max(held_up, s.observed.gated_at or 0.0)
    if s.phase in (Phase.PENDING, Phase.SCHEDULING) and not s.all_bound:
        return max(waiting_since(s), held_up) + limit
    # Pods that are bound and lost, over and over, never let the start-up clock run: both limits together end that.
    if s.phase in (Phase.STARTING, Phase.RESTARTING) and not _is_backing_off(s):
        return max(max(s.since({s.phase}), held_up) + limit + startup, _leader_asked_until(s))
    return None


def _rejected_until(s: PlanContext) -> float | None:
    """Return when the job last waited for something else than capacity: an operator that knows its fields, or, if it
    has run, the admission of a replacement. None: it does now."""
    if s.open is None:
        return 0.0
    reasons = (Reason.UNKNOWN_FIELDS.value, *(_REJECTED if s.has_run else ()))
    if s.open.reason in reasons:
        return None
    ends = [t.end.timestamp() for t in s.status.transitions if t.reason in reasons and t.end is not None]
    return max(ends, default=0.0)


def _startup_deadline(s: PlanContext, limit: float) -> float | None:
    if s.phase not in (Phase.STARTING, Phase.RESTARTING) or not s.all_bound or _is_backing_off(s):
        return None
    if s.has_run and s.ready < s.wanted:
        # What a container needs of a registry or a storage has been there before: a job that has trained waits for it
        # as for nodes, see `_pending_deadline`.
        return None
    began = max(((p.started_at if s.has_run else p.scheduled_at) or 0.0 for p in s.live), default=0.0)
    return max(max(s.since({s.phase}), began) + limit, _leader_asked_until(s))


def _leader_asked_until(s: PlanContext) -> float:
    """Return when the leader was asked long enough: an operator that has just come does not know yet what it would
    say."""
    return s.degraded_at or 0.0


def _is_backing_off(s: PlanContext) -> bool:
    """Return whether the leader waits on purpose before the next generation (restart.maxBackoff)."""
    return s.leader is not None and s.leader.phase == "backoff"


def describe_container_wait(s: PlanContext) -> str:
    """Return which pod cannot start, why, and how many more; nothing if all only take their time."""
    held = [pod for pod in s.live if pod.container_wait and not pod.running]
    if not held:
        return ""
    more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
    return f"{held[0].name}{more} cannot start: {held[0].container_wait}"


def describe_capacity_wait(s: PlanContext) -> tuple[str, float | None]:
    """Return what schedulers say of pods without a node, or that they say nothing, and when to look again for that."""
    waiting = [pod for pod in s.live if not pod.scheduled]
    if said := next((pod.unschedulable for pod in waiting if pod.unschedulable), ""):
        return said, None
    oldest = min(waiting, key=lambda pod: pod.created, default=None)
    if oldest is None:
        return "", None
    # Schedulers have nothing to say of a pod that a queue keeps from them.
    silent_at = max(oldest.created, s.observed.gated_at or 0.0) + SCHEDULER_SILENCE_SECONDS
    if s.now < silent_at:
        return "", silent_at
    frozen = s.observed.frozen
    template = frozen.find_pod(oldest.index) if frozen is not None else {}
    name = template.get("spec", {}).get("schedulerName")
    silence = f"no scheduler has said anything of {oldest.name} for {SCHEDULER_SILENCE_SECONDS:.0f} s"
    return f"{silence}: see whether {name or 'default-scheduler'}, which is to place it, runs or is behind", None


def _describe_unschedulable(s: PlanContext) -> str:
    """Return the message of the scheduler about a pod without a node, or why pods cannot be made or started.

    The text begins with ": ". It is empty without such a message, or in a phase that is neither a forming one nor
    Restarting.
    """
    text, _ = describe_capacity_wait(s)
    if (kept := pod_replacement.describe_kept_pod(s)) is not None:
        text = kept[1]
    if blocked_by(s.job) is not None and s.status.conditions:
        text = s.status.conditions[0].message
    text = text or describe_container_wait(s)
    return _add_text(text) if s.phase in FORMING_PHASES | {Phase.RESTARTING} else ""


def _add_text(text: str) -> str:
    return f": {text}" if text else ""
