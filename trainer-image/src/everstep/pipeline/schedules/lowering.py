"""From what is computed to what is done: who sends and receives what, and when gradients are reduced and tied.

All ranks' lists are cuts of one sequence in which a send and its receive stand side by side, and so do the ties of all
owners. So the next of that sequence can always be done, however strictly sends wait for receives: no deadlock. The
sequence is that of a simulation in which all stages take the same time; so it depends on the structure alone, and ranks
whose profiles differ still agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Stage, StageGraph
from everstep.pipeline.schedules.actions import Action, ActionKind, Schedule
from everstep.pipeline.schedules.checks import check_computations
from everstep.pipeline.schedules.flow import GRADIENTS, LAST, Done, Flow, Message
from everstep.pipeline.schedules.simulation import SimulatedAction, simulate_schedule


def lower_schedule(schedule: Schedule, graph: StageGraph, *, reduce: bool = True) -> Schedule:
    """`schedule` with SEND and RECEIVE for every value and gradient that changes its rank, TIE for every shared
    parameter on each rank that owns it, and, if `reduce`, REDUCE for every stage.

    A message goes to the stage that uses it first there; a gradient comes from the stage that gives the last share of
    it. REDUCE stands behind the stage's last weight gradient, TIE behind the last one of all owners, on any rank, and
    so behind their REDUCE. PipelineError if it is lowered already, is not complete, or comes to a stand.
    """
    if schedule.lowered:
        raise PipelineError(f"{schedule.name} contains sends already: give the schedule before lowering")
    flow = Flow(graph, schedule.placement)
    if (wrong := check_computations(schedule, flow)) is not None:
        raise PipelineError(str(wrong))
    equal = replace(graph, stages=(Stage(),) * len(graph.stages))
    sequence = sorted(
        _order_messages(schedule, flow, simulate_schedule(schedule, equal).timeline, reduce), key=itemgetter(0, 1)
    )
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, _, together in sequence:
        for action in together:
            lists[schedule.placement[action.stage]].append(action)
    return replace(schedule, ranks=tuple(map(tuple, lists)))


def _order_messages(
    schedule: Schedule, flow: Flow, events: Sequence[SimulatedAction], reduce: bool
) -> Iterator[tuple[float, int, tuple[Action, ...]]]:
    """Yield the actions that happen together, with their time and their place among those of one time.

    At one time, messages come first, then reductions, ties and computations. Sorting keeps the order of equal ones,
    which is the same on all ranks.
    """
    place = {event.action: number for number, event in enumerate(events)}  # comparable within a rank
    done: set[Done] = set()
    last: dict[int, float] = {}
    for event in events:
        action = event.action
        if action.kind is not ActionKind.WEIGHT_GRAD:
            done.add(Done(action.stage, action.microbatch, action.kind in GRADIENTS))
        if action.kind in LAST:
            last[action.stage] = event.end
        yield event.start, 3, (action,)
        for message in flow.gives(action, done):
            yield event.end, 0, _make_message_pair(message, action.stage, flow, place)
    if reduce:
        for stage, end in sorted(last.items()):
            yield end, 1, (Action(ActionKind.REDUCE, stage),)
    for name, owners in flow.graph.ties:
        first = {schedule.placement[stage]: stage for stage in reversed(owners)}
        end = max(last[stage] for stage in owners)
        yield end, 2, tuple(Action(ActionKind.TIE, stage, value=name) for _, stage in sorted(first.items()))


def _make_message_pair(message: Message, sender: int, flow: Flow, place: Mapping[Action, int]) -> tuple[Action, Action]:
    value, microbatch, gradient = message.value, message.microbatch, message.gradient
    if gradient:
        receiver = flow.by_value[value].source
    else:
        users = flow.users[value][message.target]
        receiver = min(users, key=lambda stage: place[Action(ActionKind.FORWARD, stage, microbatch)])
    return (
        Action(ActionKind.SEND, sender, microbatch, receiver, value, gradient),
        Action(ActionKind.RECEIVE, receiver, microbatch, sender, value, gradient),
    )
