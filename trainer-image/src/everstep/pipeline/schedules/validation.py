"""The proof that a schedule may run: nothing missing, nothing twice, all in order, no deadlock, within its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.pipeline.graph import StageGraph
from everstep.pipeline.schedules.actions import ActionKind, Schedule
from everstep.pipeline.schedules.checks import ScheduleViolation, check_computations
from everstep.pipeline.schedules.deadlock import Buffered, Rendezvous, Semantics, find_deadlock
from everstep.pipeline.schedules.flow import GRADIENTS, LAST, Flow, Message
from everstep.pipeline.schedules.messages import check_messages


@dataclass(frozen=True)
class Limits:
    """`memory`: bytes of activations and received values, of each rank, None for no limit. `in_flight`: micro-batches
    of a stage between their forward and the end of their backward."""

    memory: Sequence[int | None] | None = None
    in_flight: int | None = None


def validate_schedule(
    schedule: Schedule, graph: StageGraph, semantics: Semantics | None = None, limits: Limits | None = None
) -> ScheduleViolation | None:
    """Return None if `schedule` is proven, else what is wrong with it, and where.

    Args:
        schedule: The schedule, with its messages.
        graph: The graph of stages.
        semantics: The semantics of messages; None proves it for buffered ones and for a rendezvous with no receive
            posted ahead. What holds for `Rendezvous(a)` holds for a greater `a`.
        limits: The limits of memory; the memory that posted receives take is counted.

    Raises:
        PipelineError: The schedule is of another number of stages than `graph`.
    """
    flow = Flow(graph, schedule.placement)
    wrong = check_computations(schedule, flow) or check_messages(schedule, flow)
    every: tuple[Semantics, ...] = (Buffered(), Rendezvous()) if semantics is None else (semantics,)
    for each in every:
        wrong = wrong or find_deadlock(schedule, flow, each)
    if wrong is None and limits is not None:
        ahead = max((each.ahead for each in every if isinstance(each, Rendezvous)), default=0)
        wrong = _check_in_flight(schedule, limits) or _check_memory(schedule, flow, limits, ahead)
    return wrong


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the most micro-batches between their forward and the end of their backward."""
    most, now = [0] * schedule.stages, [0] * schedule.stages
    for actions in schedule.ranks:
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind in LAST:
                now[action.stage] -= 1
    return tuple(most)


def trace_held_bytes(schedule: Schedule, graph: StageGraph, rank: int, ahead: int = 0) -> tuple[int, ...]:
    """Bytes of activations and received values on `rank` during each of its actions, with `ahead` receives posted.

    A received value is held from when its receive is posted until the last computation here that uses it; what is kept
    for backward is the stage's activation.
    """
    flow = Flow(graph, schedule.placement)
    actions = schedule.ranks[rank]
    receives = [flow.message(action) for action in actions if action.kind is ActionKind.RECEIVE]
    posted, passed, kept, found = 0, 0, 0, list[int]()
    users: dict[Message, int] = {}
    for action in actions:
        standing = action.kind is ActionKind.RECEIVE
        while posted < min(max(passed + ahead, passed + standing), len(receives)):
            message = receives[posted]
            users[message] = 1 if message.gradient else len(flow.users[message.value][rank])
            kept += flow.by_value[message.value].size
            posted += 1
        passed += standing
        if action.kind is ActionKind.FORWARD:
            kept += graph.stages[action.stage].activation
        found.append(kept)
        if action.kind in LAST:
            kept -= graph.stages[action.stage].activation
        if action.kind is ActionKind.FORWARD or action.kind in GRADIENTS:
            for need in flow.needs(action):
                if isinstance(need, Message):
                    users[need] -= 1
                    kept -= 0 if users[need] else flow.by_value[need.value].size
    return tuple(found)


def _check_in_flight(schedule: Schedule, limits: Limits) -> ScheduleViolation | None:
    for stage, most in enumerate(in_flight(schedule)):
        if limits.in_flight is not None and most > limits.in_flight:
            reason = f"stage {stage} has {most} micro-batches in flight, {limits.in_flight} are allowed"
            return ScheduleViolation(reason, schedule.placement[stage])
    return None


def _check_memory(schedule: Schedule, flow: Flow, limits: Limits, ahead: int) -> ScheduleViolation | None:
    for rank, limit in enumerate(limits.memory or ()):
        for position, kept in enumerate(trace_held_bytes(schedule, flow.graph, rank, ahead)):
            if limit is not None and kept > limit:
                action = schedule.ranks[rank][position]
                return ScheduleViolation(f"{action}: holds {kept:,} bytes, {limit:,} are allowed", rank, position)
    return None
