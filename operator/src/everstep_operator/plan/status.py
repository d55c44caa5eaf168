"""Makes the status that is written out of a decision: transitions, timings, progress, and the economy of writes.

The same inputs give the same status, so that an unchanged one is not written. What changes all the time (step, ready
pods, messages) is written with the next change that matters, else every 30 s.
"""

from __future__ import annotations

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import (
    MAX_TRANSITIONS,
    CheckpointStatus,
    Condition,
    ConditionType,
    Phase,
    Timings,
    TrainingJobStatus,
    TrainingProgress,
    Transition,
)
from everstep_operator.plan.actions import JobEvent
from everstep_operator.plan.checkpoint_status import (
    describe_overdue,
    find_overdue_time,
    list_checkpoint_events,
    update_checkpoint,
)
from everstep_operator.plan.conditions import build_conditions
from everstep_operator.plan.decision import Decision
from everstep_operator.plan.gang import BLOCKED_REASONS
from everstep_operator.plan.plan_context import FORMING_PHASES, PlanContext, to_utc
from everstep_operator.plan.pod_replacement import LOSS_REASONS
from everstep_operator.plan.restart_budget import charge_ended_generations
from everstep_operator.plan.usage import find_booking_time, update_usage

WRITE_INTERVAL_SECONDS = 30.0
# A job that forms is in several phases within a moment. A status of each would cost the API server as much as the pods
# do, in the very moment in which kubelets begin with them.
FORMING_INTERVAL_SECONDS = 0.5
_TIMING_OF_PHASE = {
    Phase.PENDING: "pending",
    Phase.SCHEDULING: "scheduling",
    Phase.STARTING: "starting",
    Phase.RUNNING: "running",
    Phase.RESTARTING: "recovering",
}
_PHASES_THAT_GO_ON = frozenset({Phase.SCHEDULING, Phase.STARTING, Phase.RUNNING, Phase.RESTARTING})
_WARNING_PHASES = frozenset({Phase.FAILED, Phase.RESTARTING})
_FORMING = FORMING_PHASES - {Phase.SUSPENDED}
_FORMING_REASONS = frozenset({Reason.WAITING_FOR_CAPACITY, Reason.SCHEDULED})


def build_status(s: PlanContext, decision: Decision) -> tuple[TrainingJobStatus, tuple[JobEvent, ...], float | None]:
    """Return the status to have, the events of this transition, and when a change that was held back is due."""
    old = s.status
    moved = _starts_transition(s, decision)
    checkpoint = update_checkpoint(s)
    usage, has_ended = update_usage(s, decision)
    epoch = max(old.epoch, decision.epoch or 0)
    generation = old.generation if decision.generation is None else decision.generation
    new = old.model_copy(
        update={
            "phase": decision.phase,
            "observed_generation": s.job.metadata.generation,
            "conditions": build_conditions(s, decision, checkpoint),
            "epoch": epoch,
            "generation": generation,
            "template": decision.template or old.template,
            "nodes": 0 if decision.phase is Phase.SUSPENDED else s.wanted,
            "ready_nodes": s.ready,
            "progress": _update_progress(s, (epoch, generation)),
            "checkpoint": checkpoint,
            "restarts": decision.restarts or old.restarts,
            "start_failures": decision.start_failures,
            "last_failure": decision.last_failure or old.last_failure,
            "disruption": decision.disruption,
            "transitions": _update_transitions(s, decision) if moved else old.transitions,
            "timings": _update_timings(s, moved, checkpoint),
            "usage": usage,
        }
    )
    overdue = find_overdue_time(s, checkpoint)
    wake = overdue if overdue is not None and overdue > s.now else None
    written_at = s.observed.status_written_at or 0.0
    soon = written_at + WRITE_INTERVAL_SECONDS
    booked = find_booking_time(old.usage, usage, has_ended, written_at, WRITE_INTERVAL_SECONDS)
    if not moved and _strip_volatile_fields(new) == _strip_volatile_fields(old):
        is_news = new.model_copy(update={"usage": old.usage}) != old
        dues = [at for at in (soon if is_news else None, booked) if at is not None]
        if not dues:
            return old, (), wake
        if s.now < min(dues):
            return old, (), min(dues) if wake is None else min(*dues, wake)
    # A clock may have been set back.
    if written_at <= s.now < written_at + FORMING_INTERVAL_SECONDS and _only_forms_on(s, decision, new):
        due = written_at + FORMING_INTERVAL_SECONDS
        return old, (), due if wake is None else min(due, wake)
    changed_phase = decision.phase is not old.phase or decision.phase is Phase.PENDING or decision.again
    warns = decision.phase in _WARNING_PHASES or decision.stalled
    said = decision.message or decision.reason.meaning
    event = JobEvent("Warning" if warns else "Normal", decision.reason.value, said[:1024])
    # Another attempt at the same thing is no news.
    attempts = (
        old.transitions[-2:] if decision.reason in BLOCKED_REASONS else old.transitions[-1:]
    )  # with the one between
    news = moved and changed_phase and not (decision.again and any(t.reason == decision.reason for t in attempts))
    return new, (*((event,) if news else ()), *_list_other_events(s, new)), wake


def update_ended_status(s: PlanContext) -> TrainingJobStatus:
    """Return the status of a job that has ended, as one of the present `metadata.generation`: whatever of the spec was
    edited since, the job has ended as it did, and tools that wait for the status to be of it need not go on.

    With what pod 0 said last, where another pod's end was seen before its own: only its agent knows how far the job
    came, and which restarts there were while nobody asked. Of a job that has failed these are not counted: the newest
    may be what has ended it.
    """
    status, generation = s.status, s.job.metadata.generation
    if status.observed_generation != generation:
        conditions = [each.model_copy(update={"observed_generation": generation}) for each in status.conditions]
        status = status.model_copy(update={"observed_generation": generation, "conditions": conditions})
    if s.head is None or s.head.ended is None or s.head.ended.word is None:
        return status
    told: dict[str, object] = {}
    progress, checkpoint = _update_progress(s, (status.epoch, status.generation)), update_checkpoint(s)
    # A rate alone that is told a little otherwise is not worth a write.
    if _find_step(progress) != _find_step(status.progress) or _find_step(checkpoint) != _find_step(status.checkpoint):
        told |= {"progress": progress, "checkpoint": checkpoint}
    if s.phase is Phase.SUCCEEDED:
        account = charge_ended_generations(s, over=True)
        if account.restarts != status.restarts:
            told |= {"restarts": account.restarts, "last_failure": account.last_failure or status.last_failure}
    return status.model_copy(update=told) if told else status


def _find_step(told: TrainingProgress | CheckpointStatus | None) -> int | None:
    return told.step if told is not None else None


def _list_other_events(s: PlanContext, new: TrainingJobStatus) -> list[JobEvent]:
    """Return events of what may go wrong in any phase."""
    events = []
    last, ready = (status.condition(ConditionType.READY) for status in (s.status, new))
    if ready is not None and ready.reason == Reason.CONTAINER_WAITING and (last is None or last.reason != ready.reason):
        events.append(JobEvent("Warning", ready.reason, ready.message[:1024]))
    before, nodes = (status.condition(ConditionType.NODES_HEALTHY) for status in (s.status, new))
    if nodes is not None and nodes.status == "False" and (before is None or before.reason != nodes.reason):
        events.append(JobEvent("Warning", nodes.reason, nodes.message[:1024]))
    claims = new.condition(ConditionType.VOLUMES_SHARED)
    if claims is not None and claims.status == "False" and not s.status.is_false(ConditionType.VOLUMES_SHARED):
        events.append(JobEvent("Warning", claims.reason, claims.message[:1024]))
    known = s.status.disruption
    pending = known is not None and known.deadline is not None and known.leaving is None
    if known is not None and pending and new.disruption is None and new.phase in _PHASES_THAT_GO_ON:
        message = f"the notice of {', '.join(known.nodes[:3])} is withdrawn ({known.source}): ranks go on"
        events.append(JobEvent("Normal", Reason.NOTICE_WITHDRAWN.value, message[:1024]))
    failure = new.last_failure
    if failure is not None and failure.reason == Reason.START_FAILED and failure != s.status.last_failure:
        events.append(JobEvent("Warning", failure.reason, failure.message[:1024]))
    stale, was = (status.is_true(ConditionType.CHECKPOINT_STALE) for status in (new, s.status))
    if stale and not was:
        events.append(JobEvent("Warning", Reason.CHECKPOINT_OVERDUE.value, describe_overdue(s)))
    return [*events, *list_checkpoint_events(s.status.checkpoint, new.checkpoint)]


def _starts_transition(s: PlanContext, decision: Decision) -> bool:
    if s.open is None or decision.phase is not s.status.phase or decision.again:
        return True
    told = s.open.reason != decision.reason
    return told and (
        decision.phase is Phase.PENDING
        or s.open.reason in BLOCKED_REASONS
        # Why a pod was lost is charged by what stands here, when the pod is gone before its generation has ended.
        or (s.open.reason == Reason.RESTARTING and decision.reason in LOSS_REASONS)
    )


def _only_forms_on(s: PlanContext, decision: Decision, new: TrainingJobStatus) -> bool:
    """Return whether a status tells nothing but that the first set of pods waits for nodes, or has them."""
    if s.open is None or s.phase not in _FORMING or s.open.reason in BLOCKED_REASONS:
        return False
    if decision.phase not in _FORMING or decision.reason not in _FORMING_REASONS or decision.stalled:
        return False
    if _list_other_conditions(new) != _list_other_conditions(s.status):
        return False
    told = ("phase", "transitions", "timings", "conditions", "ready_nodes", "usage")
    return new.model_copy(update={name: getattr(s.status, name) for name in told}) == s.status


def _list_other_conditions(status: TrainingJobStatus) -> list[Condition]:
    """Return the conditions that tell more than where a job is on its way."""
    return [each for each in status.conditions if each.type not in (ConditionType.READY, ConditionType.RECONCILING)]


def _update_transitions(s: PlanContext, decision: Decision) -> list[Transition]:
    now = to_utc(s.now)
    known = list(s.status.transitions)
    if known:
        known[-1] = known[-1].model_copy(update={"end": now})
    # Attempt after attempt at the same thing is one line: it began with the first. So is what is rejected again, with
    # the attempt between: a day of them would push out all that the job has been through.
    rejected = (decision.phase, decision.reason)
    if len(known) >= 2 and decision.reason in BLOCKED_REASONS and (known[-2].phase, known[-2].reason) == rejected:
        known[-2:] = [known[-2].model_copy(update={"end": now})]
    if len(known) >= 2 and (known[-2].phase, known[-2].reason) == (known[-1].phase, known[-1].reason):
        known[-2:] = [known[-2].model_copy(update={"end": now})]
    known.append(Transition.model_construct(phase=decision.phase, reason=decision.reason.value, start=now, end=None))
    return known[-MAX_TRANSITIONS:]


def _update_timings(s: PlanContext, moved: bool, checkpoint: CheckpointStatus | None) -> Timings:
    """Return the timings. Time is booked when a phase ends: a status that only counted seconds would be written every
    second. Lost time is booked when ranks say from which step they continue."""
    timings = s.status.timings
    changes: dict[str, float | None] = {}
    if moved and s.open is not None and (bucket := _TIMING_OF_PHASE.get(s.open.phase)) is not None:
        spent = max(0.0, s.now - s.open.start.timestamp())
        changes[bucket] = round(getattr(timings, bucket) + spent, 3)
    known = s.status.checkpoint.lost_steps if s.status.checkpoint is not None else 0
    steps = checkpoint.lost_steps - known if checkpoint is not None else 0
    rate = _find_rate(s.status)
    if steps > 0 and rate:
        running = changes.get("running") or timings.running
        if not moved and s.open is not None and s.open.phase is Phase.RUNNING:
            running += max(0.0, s.now - s.open.start.timestamp())
        # A rate may be anything above 0: what is lost was trained in the time that was running.
        changes["lost"] = round(min(timings.lost + steps / rate, max(running, timings.lost)), 3)
    if not changes:
        return timings
    timings = timings.model_copy(update=changes)
    busy = timings.running + timings.recovering
    goodput = round(max(0.0, timings.running - timings.lost) / busy, 4) if busy > 0 else None
    return timings.model_copy(update={"goodput": goodput})


def _find_rate(status: TrainingJobStatus) -> float | None:
    """Return how many steps, counted as checkpoints are, were trained in a second."""
    if status.checkpoint is not None and status.checkpoint.steps_per_second is not None:
        return status.checkpoint.steps_per_second
    return status.progress.steps_per_second if status.progress is not None else None


def _update_progress(s: PlanContext, named: tuple[int, int]) -> TrainingProgress | None:
    """Return how far the job has come, in a status that names this epoch and generation."""
    old = s.status.progress
    word = s.head.ended.word if s.head is not None and s.head.ended is not None else None
    # The last answer of the leader, if there was one, is older than its last word.
    teller = word if word is not None and word.progress is not None else s.leader
    if teller is None:
        return old
    seen, order = teller.progress, (teller.epoch, teller.generation)
    if seen is None or seen.step is None:
        return old
    # Steps only grow, but that a new generation may begin further back, at the checkpoint it has loaded: in the write
    # that names this generation.
    begins = named == order != (s.status.epoch, s.status.generation)
    if old is not None and not begins and seen.step < old.step:
        return old
    return TrainingProgress.model_construct(
        step=seen.step, total_steps=seen.total_steps, steps_per_second=seen.steps_per_second
    )


def _strip_volatile_fields(status: TrainingJobStatus) -> TrainingJobStatus:
    """Return a status without what may wait for the next write."""
    told = [c.model_copy(update={"message": ""}) for c in status.conditions]
    kept = status.checkpoint
    if kept is not None:  # that one more was saved can wait; that a save failed, or what was restored, cannot
        waits = dict.fromkeys(("step", "time", "bytes", "stall_seconds", "trained_step", "steps_per_second"))
        kept = kept.model_copy(update=waits)
    return status.model_copy(
        update={"conditions": told, "ready_nodes": 0, "progress": None, "checkpoint": kept, "usage": None}
    )
