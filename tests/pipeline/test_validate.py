"""Every schedule that is made is proven, and what is wrong with any other is found and named."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.pipeline.graph import Edge, Stage, StageGraph, make_chain_graph
from everstep.pipeline.schedules import (
    Action,
    ActionKind,
    Buffered,
    Limits,
    Rendezvous,
    Schedule,
    ScheduleViolation,
    compute_peak_memory,
    in_flight,
    lower_schedule,
    make_schedule,
    parse_schedule,
    trace_held_bytes,
    validate_schedule,
)
from everstep.pipeline.schedules.actions import MESSAGES, parse_rank
from everstep.pipeline.schedules.deadlock import Semantics, find_deadlock
from everstep.pipeline.schedules.flow import Flow
from everstep.pipeline.schedules.messages import check_messages
from tests.pipeline.random_pipelines import pipelines

Pipeline = tuple[Schedule, StageGraph]
SEMANTICS: tuple[Semantics, ...] = (Buffered(), Rendezvous(), Rendezvous(1), Rendezvous(3))
GRAPH = replace(make_chain_graph([Stage()] * 4), ties=(("w", (0, 3)),))
PROVEN = lower_schedule(make_schedule("1f1b", 4, 4, 4), GRAPH)


def with_rank(schedule: Schedule, rank: int, actions: Iterable[Action]) -> Schedule:
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))


def why(schedule: Schedule, graph: StageGraph, semantics: Semantics | None = None) -> str:
    return str(validate_schedule(schedule, graph, semantics))


@settings(max_examples=25)
@given(pipelines(), st.booleans())
def test_whatever_is_lowered_is_proven(pipeline: Pipeline, reduce: bool) -> None:
    schedule, graph = pipeline
    assert validate_schedule(lower_schedule(schedule, graph, reduce=reduce), graph) is None


@pytest.mark.chaos
@pytest.mark.timeout(900)
@settings(max_examples=1500, deadline=None)
@given(pipelines(most_ranks=6, most_microbatches=14))
def test_whatever_is_lowered_is_proven_at_length(pipeline: Pipeline) -> None:
    schedule, graph = pipeline
    assert validate_schedule(lower_schedule(schedule, graph), graph) is None


@settings(max_examples=25)
@given(pipelines().filter(lambda pipeline: len(pipeline[0].ranks) > 1), st.randoms(use_true_random=False))
def test_a_message_dropped_doubled_or_too_late_is_found(pipeline: Pipeline, rng: random.Random) -> None:
    schedule = lower_schedule(*pipeline)
    found = [
        (r, p)
        for r, actions in enumerate(schedule.ranks)
        for p, a in enumerate(actions)
        if a.kind is not ActionKind.REDUCE
    ]
    rank, position = rng.choice(found)
    actions = list(schedule.ranks[rank])
    dropped = with_rank(schedule, rank, actions[:position] + actions[position + 1 :])
    assert validate_schedule(dropped, pipeline[1]) is not None
    assert validate_schedule(with_rank(schedule, rank, [*actions, actions[position]]), pipeline[1]) is not None
    if actions[position].kind is ActionKind.RECEIVE:
        late = with_rank(schedule, rank, [*actions[:position], *actions[position + 1 :], actions[position]])
        assert validate_schedule(late, pipeline[1]) is not None


@settings(max_examples=25)
@given(pipelines().filter(lambda pipeline: len(pipeline[0].ranks) > 1), st.randoms(use_true_random=False))
def test_deadlocks_are_found_exactly(pipeline: Pipeline, rng: random.Random) -> None:
    """Messages out of place: where both ends still agree, there is a deadlock if and only if what must come before
    what has a cycle."""
    schedule, graph = lower_schedule(*pipeline), pipeline[1]
    for _ in range(rng.randint(1, 4)):
        rank = rng.randrange(len(schedule.ranks))
        actions = list(schedule.ranks[rank])
        movable = [p for p, action in enumerate(actions) if action.kind in MESSAGES]
        if movable:
            action = actions.pop(rng.choice(movable))
            actions.insert(rng.randrange(len(actions) + 1), action)
            moved = with_rank(schedule, rank, actions)
            if check_messages(moved, Flow(graph, schedule.placement)) is None:
                schedule = moved
    for semantics in SEMANTICS:
        wrong = find_deadlock(schedule, Flow(graph, schedule.placement), semantics)
        assert (wrong is not None) == has_cycle(schedule, Flow(graph, schedule.placement), semantics)


def has_cycle(schedule: Schedule, flow: Flow, semantics: Semantics) -> bool:
    """The same question asked of a graph: an event is an action that is done, and needs those that come before it."""
    before: dict[object, set[object]] = {}
    send_of: dict[object, object] = {}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if action.kind is ActionKind.SEND:
                send_of[flow.message(action)] = (rank, position)
    for rank, actions in enumerate(schedule.ranks):
        receives: list[object] = []
        for position, action in enumerate(actions):
            event: object = (rank, position)
            if action.kind is ActionKind.TIE:
                before.setdefault(action.value, set()).update({(rank, position - 1)} if position else ())
                before.setdefault(event, set()).add(action.value)
            before.setdefault(event, set()).update({(rank, position - 1)} if position else ())
            if action.kind is ActionKind.RECEIVE:
                send = send_of[flow.message(action)]
                before[event].add(send)
                if isinstance(semantics, Rendezvous):
                    posted = receives[len(receives) - semantics.ahead :][:1] if semantics.ahead else []
                    if not semantics.ahead:
                        posted = [(rank, position - 1)] if position else []
                    elif len(receives) < semantics.ahead:
                        posted = []
                    before.setdefault(send, set()).update(posted)
                receives.append(event)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return True
    return False


def test_two_ranks_that_send_first_hang_unless_sends_are_buffered_or_receives_posted() -> None:
    graph = StageGraph((Stage(),) * 4, (Edge("down", 0, (1,)), Edge("up", 1, (2,)), Edge("on", 2, (3,))))
    schedule = parse_schedule(
        "0F0 0S0>1:down 0F1 0S1>1:down 2R0<1:up 2F0 2S0>3:on 2R1<1:up 2F1 2S1>3:on "
        "2R0<3^on 2B0 2S0>1^up 2R1<3^on 2B1 2S1>1^up 0R0<1^down 0B0 0R1<1^down 0B1\n"
        "1R0<0:down 1F0 1S0>2:up 1R1<0:down 1F1 1S1>2:up 3R0<2:on 3F0 3R1<2:on 3F1 "
        "3B0 3S0>2^on 3B1 3S1>2^on 1R0<2^up 1B0 1S0>0^down 1R1<2^up 1B1 1S1>0^down\n"
    )
    assert validate_schedule(schedule, graph, Buffered()) is None
    assert validate_schedule(schedule, graph, Rendezvous(1)) is None
    wrong = validate_schedule(schedule, graph, Rendezvous())
    assert wrong is not None
    assert wrong.cycle == (
        "rank 0 waits at action 3 for rank 1 to post the receive of 0S1>1:down",
        "rank 1 waits at action 2 for rank 0 to post the receive of 1S0>2:up",
    )
    assert (wrong.rank, wrong.position) == (0, 3)
    assert validate_schedule(schedule, graph) == wrong


def test_sends_in_another_order_than_their_receives_are_told() -> None:
    graph = StageGraph((Stage(),) * 2, (Edge("a", 0, (1,)), Edge("b", 0, (1,))))
    schedule = lower_schedule(make_schedule("simple", 2, 2, 1), graph)
    first, second = list(schedule.ranks[0]), schedule.ranks[0]
    first[1], first[2] = second[2], second[1]
    assert "message 0 from rank 0 to rank 1 is sent as 0S0>1:b (action 1), but received as 1R0<0:a" in why(
        with_rank(schedule, 0, first), graph
    )


@pytest.mark.parametrize(
    ("rank", "old", "new", "told"),
    [
        (1, "1R0<0:v0 1F0", "1F0 1R0<0:v0", "1F0: uses the 'v0' of micro-batch 0 from rank 0 to rank 1, which was not"),
        (0, "0F0 0S0>1:v0", "0S0>1:v0 0F0", "0S0>1:v0: is sent before it is there"),
        (0, "0S0>1:v0", "", "the 'v0' of micro-batch 0 from rank 0 to rank 1 is never sent"),
        (0, "0S0>1:v0", "0S0>1:v0 0S0>1:v0", "is there twice"),
        (0, "0S0>1:v0", "0S0>1:v0 0S0>2:v0", "'v0' is of stage 0, used by 1"),
        (0, "0S0>1:v0", "0S0>1:v0 0S9>1:v0", "there are 4 micro-batches"),
        (0, "0S0>1:v0", "0S0>1:v0 0S0>1:x", "there is no value 'x'"),
        (0, "0B3 0D", "0D 0B3", "0D: comes before the last weight gradient of stage 0"),
        (0, "0D", "", "0D is missing: all stages are reduced, or none"),
        (0, "0D", "0D 0D", "0D: is there twice"),
        (0, "0T:w", "", "0T:w is missing"),
        (0, "0T:w", "0T:w 0T:w", "is there twice"),
        (0, "0D 0T:w", "0T:w 0D", "comes before the reduction of its owners"),
        (1, "1D", "1D 1T:w", "stage 1 is not the lowest here that owns 'w'"),
        (1, "1F0", "1F0 2F0", "2F0: stage 2 is not on this rank"),
        (1, "1B2", "", "1B2 is missing"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(rank: int, old: str, new: str, told: str) -> None:
    line = " ".join(map(str, PROVEN.ranks[rank]))
    wrong = validate_schedule(with_rank(PROVEN, rank, parse_rank(line.replace(old, new, 1))), GRAPH)
    assert isinstance(wrong, ScheduleViolation)
    assert told in str(wrong)


def test_a_schedule_that_was_not_lowered_is_told_so() -> None:
    assert "lower_schedule() adds what is sent" in why(make_schedule("1f1b", 2, 2, 2), make_chain_graph([Stage()] * 2))


def test_a_received_value_that_nobody_uses_is_told() -> None:
    graph = StageGraph((Stage(),) * 2, (Edge("v", 0, (1,), gradient=False),))
    schedule = lower_schedule(make_schedule("simple", 2, 2, 1), graph)
    extra = Action(ActionKind.RECEIVE, 0, 0, 1, "v", gradient=True)
    assert "a value without gradient" in why(with_rank(schedule, 0, [*schedule.ranks[0], extra]), graph)


@settings(max_examples=15)
@given(pipelines(), st.integers(0, 3))
def test_the_memory_bound_is_exact(pipeline: Pipeline, ahead: int) -> None:
    """The least limit that is accepted is what the rank holds at its worst action."""
    schedule, graph = lower_schedule(*pipeline), pipeline[1]
    most = [max(trace_held_bytes(schedule, graph, rank, ahead)) for rank in range(len(schedule.ranks))]
    assert validate_schedule(schedule, graph, Rendezvous(ahead), Limits(memory=most)) is None
    wrong = validate_schedule(schedule, graph, Rendezvous(ahead), Limits(memory=[most[0] - 1, *most[1:]]))
    assert wrong is not None
    assert wrong.rank == 0
    assert trace_held_bytes(schedule, graph, 0, ahead)[wrong.position] == most[0]
    assert all(kept >= peak for kept, peak in zip(most, compute_peak_memory(schedule, graph), strict=True))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_receives_posted_ahead_take_their_memory(ahead: int) -> None:
    graph = make_chain_graph([Stage(activation=100)] * 2, size=10)
    schedule = lower_schedule(make_schedule("simple", 2, 2, 4), graph)
    assert max(trace_held_bytes(schedule, graph, 1, ahead)) == 400 + 10  # the last forward has no receive behind it
    assert trace_held_bytes(schedule, graph, 1, ahead)[1] == 100 + 10 * (1 + ahead)


def test_micro_batches_in_flight_are_limited() -> None:
    assert in_flight(PROVEN) == (4, 3, 2, 1)
    assert validate_schedule(PROVEN, GRAPH, limits=Limits(in_flight=4)) is None
    wrong = validate_schedule(PROVEN, GRAPH, limits=Limits(in_flight=3))
    assert wrong == ScheduleViolation("stage 0 has 4 micro-batches in flight, 3 are allowed", 0)


def test_a_walk_backwards_is_not_taken_for_a_proof() -> None:
    """Messages are right in number and order, but a rank computes what it cannot have yet."""
    schedule = parse_schedule(
        "0F0 0S0>1:v0 0R0<1^v0 0B0 0F1 0S1>1:v0 0R1<1^v0 0B1\n1R1<0:v0 1F1 1B1 1S1>0^v0 1R0<0:v0 1F0 1B0 1S0>0^v0\n"
    )
    assert "received as 1R1<0:v0" in why(schedule, make_chain_graph([Stage()] * 2))
