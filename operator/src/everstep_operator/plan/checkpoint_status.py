"""The job's checkpoints in its status: the newest one, what generations began from, and what is worth an event."""

from __future__ import annotations

from datetime import timedelta

from everstep_operator.api.reasons import Reason
from everstep_operator.api.scalars import format_duration
from everstep_operator.api.status import CheckpointStatus, Phase, RestoreStatus
from everstep_operator.plan.actions import JobEvent
from everstep_operator.plan.leader_view import ReportedRestore, parse_generation_id
from everstep_operator.plan.plan_context import PlanContext, to_utc

OVERDUE_INTERVALS = 3
MAX_STEPS = 2**53  # as far as JSON readers count
DEFAULT_OVERDUE = timedelta(hours=1)  # of a job that does not say how often it saves
MAX_INTERVAL_SECONDS = 28 * 86_400  # as the API allows
LEAST_OVERDUE = timedelta(minutes=2)  # a save itself takes time


def update_checkpoint(s: PlanContext) -> CheckpointStatus | None:
    """Return the job's checkpoints as they are known now.

    Args:
        s: The job at this moment. What a leader says whose epoch is over counts no more.
    """
    old = s.status.checkpoint
    word = s.head.ended.word if s.head is not None and s.head.ended is not None else None
    # The last answer of the leader, if there was one, is older than its last word.
    teller = word if word is not None and word.checkpoint is not None else s.leader
    seen = teller.checkpoint if teller is not None else None
    if seen is None or teller is None or teller.epoch < s.status.epoch:
        return old
    base = old or CheckpointStatus()
    restored, lost = _update_restored(s, base, seen.restored)
    if seen.step is None or seen.step == base.step:
        step, time, size = base.step, base.time, base.bytes
    else:
        step, time, size = seen.step, None if seen.at is None else to_utc(seen.at), seen.bytes
    return CheckpointStatus.model_construct(
        step=step,
        time=time,
        bytes=size if size is not None else seen.bytes,
        stall_seconds=base.stall_seconds if seen.stall_seconds is None else seen.stall_seconds,
        failed_saves=seen.failed_saves,
        restored=restored,
        lost_steps=min(base.lost_steps + lost, MAX_STEPS),
        trained_step=base.trained_step if seen.trained_step is None else seen.trained_step,
        steps_per_second=base.steps_per_second if seen.steps_per_second is None else seen.steps_per_second,
    )


def _update_restored(
    s: PlanContext, base: CheckpointStatus, seen: ReportedRestore | None
) -> tuple[RestoreStatus | None, int]:
    """Return the newest restore, and the steps that it lost."""
    old = base.restored
    if seen is None or (old is not None and parse_generation_id(old.id) >= parse_generation_id(seen.id)):
        return old, 0
    lost = seen.lost_steps
    last = base.trained_step
    if last is None and s.status.progress is not None:
        last = s.status.progress.step
    if lost is None and last is not None:
        # This leader has not heard of the steps before it. The status has, though it may be half a minute behind.
        lost = max(0, last - seen.step)
    restored = RestoreStatus.model_construct(
        id=seen.id,
        step=seen.step,
        tier=seen.tier or None,
        seconds=seen.seconds,
        passed_over=seen.passed_over,
        lost_steps=lost,
    )
    return restored, lost or 0


def list_checkpoint_events(old: CheckpointStatus | None, new: CheckpointStatus | None) -> list[JobEvent]:
    """Return the events of what has changed.

    Args:
        old: The job's checkpoints before.
        new: The same now.
    """
    if new is None:
        return []
    before = old or CheckpointStatus()
    events = []
    if new.failed_saves > before.failed_saves:
        last = f"the newest one is of step {new.step}" if new.step is not None else "there is none yet"
        events.append(JobEvent("Warning", Reason.SAVE_FAILED.value, f"a checkpoint could not be saved; {last}"))
    restored = new.restored
    if restored is not None and restored != before.restored:
        if restored.passed_over:
            told = f"{restored.passed_over} newer checkpoint(s) are damaged: step {restored.step} was restored"
            events.append(JobEvent("Warning", Reason.CHECKPOINT_DAMAGED.value, told))
        events.append(JobEvent("Normal", Reason.RESTORED.value, describe_restore(restored)))
    return events


def describe_restore(restored: RestoreStatus) -> str:
    """Return a restore in words."""
    if not restored.step:
        text = "training starts at step 0: there was no checkpoint"
    else:
        place = {"memory": " from the nodes' memory", "peer": " from another node's memory", "store": " from the store"}
        took = f" in {restored.seconds:.2f} s" if restored.seconds is not None else ""
        text = f"training continues from step {restored.step}{place.get(restored.tier or '', '')}{took}"
    return f"{text}; {restored.lost_steps} steps are trained again" if restored.lost_steps else text


def find_overdue_time(s: PlanContext, new: CheckpointStatus | None) -> float | None:
    """Return when a save is overdue, or since when it is; None where the job saves nothing, or does not run.

    Args:
        s: The job at this moment.
        new: Its checkpoints.
    """
    if s.open is None or s.open.phase is not Phase.RUNNING or not _tells_of_saves(s, new):
        return None
    newest = new.time if new is not None else None
    since = s.open.start if newest is None else max(newest, s.open.start)
    return since.timestamp() + _find_limit(s).total_seconds()


def _tells_of_saves(s: PlanContext, new: CheckpointStatus | None) -> bool:
    """Return whether ranks tell of saves, or would if there were any: files that a program writes in its own way are
    published, or lie in a volume, and nobody here hears of them. In plain mode nobody hears of anything."""
    spec = s.spec.checkpoint
    if s.plain or (spec is not None and spec.folder is not None):
        return False
    asked = spec is not None and (spec.store, spec.every, spec.every_steps) != (None,) * 3
    return asked or new is not None


def describe_overdue(s: PlanContext) -> str:
    """Return what is said of a save that is overdue; the same for as long as it is."""
    return f"no checkpoint was saved for more than {format_duration(_find_limit(s))}; see the ranks' log for the cause"


def _find_limit(s: PlanContext) -> timedelta:
    spec = s.spec.checkpoint
    every = spec.interval if spec is not None else None
    told = s.leader.checkpoint if s.leader is not None else None
    if told is not None and told.every is not None:  # the script may have another interval than its job
        every = timedelta(seconds=min(told.every, MAX_INTERVAL_SECONDS)) or None
    return DEFAULT_OVERDUE if every is None else max(OVERDUE_INTERVALS * every, LEAST_OVERDUE)
