"""Check the computations of a schedule, as seen from each rank's list alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Stage, StageGraph
from everstep.pipeline.schedules.actions import COMPUTE, Action, ActionKind, Schedule
from everstep.pipeline.schedules.flow import GRADIENTS, Done, Flow


@dataclass(frozen=True)
class ScheduleViolation:
    """The reason why a schedule must not run.

    `rank` and `position` say where, if it is at one place; `cycle` says which action of a deadlock waits for which.
    """

    reason: str
    rank: int = -1
    position: int = -1
    cycle: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f", action {self.position}" if self.position >= 0 else ""
        return (f"rank {self.rank}{at}: " if self.rank >= 0 else "") + "; ".join((self.reason, *self.cycle))


def check_computations(schedule: Schedule, flow: Flow) -> ScheduleViolation | None:
    """Every stage does every micro-batch once, forward before backward before weight gradient, and nothing on a rank
    comes before what it needs of the same rank."""
    ranks = len(schedule.ranks)
    if any(not 0 <= rank < ranks for rank in schedule.placement):
        return ScheduleViolation(
            f"the placement {schedule.placement} names ranks that are not there: there are {ranks}"
        )
    for rank, actions in enumerate(schedule.ranks):
        wrong = _check_rank(schedule, flow, rank, actions)
        if wrong is not None:
            return wrong
    return None


def complete_schedule(schedule: Schedule) -> Schedule:
    """A schedule that was given, if that can be said without a model: each stage does each micro-batch once and in
    order. PipelineError."""
    plain = StageGraph((Stage(),) * schedule.stages)
    if (wrong := check_computations(schedule, Flow(plain, schedule.placement))) is not None:
        raise PipelineError(f"schedule {schedule.name}: {wrong}")
    return schedule


def _check_rank(schedule: Schedule, flow: Flow, rank: int, actions: Iterable[Action]) -> ScheduleViolation | None:
    seen: set[Action] = set()
    done: set[Done] = set()
    for position, action in enumerate(actions):
        if not 0 <= action.stage < schedule.stages or schedule.placement[action.stage] != rank:
            return ScheduleViolation(f"{action}: stage {action.stage} is not on this rank", rank, position)
        if action.kind not in COMPUTE:
            continue
        if not 0 <= action.microbatch < schedule.microbatches:
            return ScheduleViolation(f"{action}: there are {schedule.microbatches} micro-batches", rank, position)
        if (why := _find_repeat(action, seen)) is not None:
            return ScheduleViolation(f"{action}: {why}", rank, position)
        for need in flow.needs(action):
            if isinstance(need, Done) and need not in done:
                what = "backward" if need.gradient else "forward"
                reason = f"{action}: comes before the {what} of stage {need.stage}, which is on the same rank"
                return ScheduleViolation(reason, rank, position)
        seen.add(action)
        if action.kind is not ActionKind.WEIGHT_GRAD:
            done.add(Done(action.stage, action.microbatch, action.kind in GRADIENTS))
    for stage in schedule.stages_of(rank):
        for microbatch in range(schedule.microbatches):
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
                whole = Action(ActionKind.BACKWARD, stage, microbatch)
                if Action(kind, stage, microbatch) not in seen and (kind is ActionKind.FORWARD or whole not in seen):
                    if kind is ActionKind.BACKWARD and Action(ActionKind.INPUT_GRAD, stage, microbatch) in seen:
                        continue
                    return ScheduleViolation(f"{Action(kind, stage, microbatch)} is missing", rank)
    return None


def _find_repeat(action: Action, seen: set[Action]) -> str | None:
    if action in seen:
        return "is there twice"
    if action.kind in GRADIENTS:
        other = ActionKind.INPUT_GRAD if action.kind is ActionKind.BACKWARD else ActionKind.BACKWARD
        if Action(other, action.stage, action.microbatch) in seen:
            return f"there is a backward already: {Action(other, action.stage, action.microbatch)}"
    return None
