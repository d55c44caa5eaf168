"""The simulator meets every closed form exactly, and never promises less time than there must be."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Device, Edge, Link, Stage, StageGraph, make_chain_graph, make_uniform_links
from everstep.pipeline.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    Result,
    Schedule,
    find_schedule,
    lower_schedule,
    make_schedule,
    parse_schedule,
    simulate_schedule,
    trace_memory,
)
from everstep.pipeline.schedules.flow import Done, Flow, Message
from tests.pipeline.random_pipelines import pipelines

PHASES = [(12, 12, 12), (60, 72, 48)]  # F, B, W of a rank; a multiple of 12, so that chunks of it are whole numbers
SIZES = [(4, 8), (4, 16), (8, 16)]


def run(name: str, ranks: int, chunks: int, m: int, phases: tuple[int, int, int]) -> Result:
    forward, input_grad, weight_grad = (phase / chunks for phase in phases)
    stage = Stage(forward, input_grad, weight_grad)
    return simulate_schedule(
        make_schedule(name, ranks * chunks, ranks, m), make_chain_graph([stage] * (ranks * chunks))
    )


def evaluate(formula: str, **values: float) -> float:
    """A formula of the table of schedules: arXiv 1811.06965, 2104.04473, 2401.10241."""
    text = formula.partition(" if ")[0].replace("−", "-")
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text)
    return float(eval(text, {"min": min}, values))


def bubble(name: str, p: int, v: int, f: float, b: float, w: float) -> float:
    return evaluate(find_schedule(name).bubble, p=p, v=v, F=f, B=b, W=w)


def peak(name: str, p: int, v: int, m: int) -> float:
    """In micro-batches of a rank."""
    return evaluate(find_schedule(name).held, p=p, v=v, m=m)


@pytest.mark.parametrize("phases", PHASES)
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(
    ("name", "v"),
    [
        (each.name, chunks)
        for each in SCHEDULES
        for chunks in range(1, 5)
        if each.is_worth_trying(chunks) and " if " not in each.bubble
    ],
)
def test_equal_stages_take_what_the_closed_form_says(
    name: str, v: int, p: int, m: int, phases: tuple[int, int, int]
) -> None:
    result = run(name, p, v, m, phases)
    assert result.makespan - m * sum(phases) == result.bubble == bubble(name, p, v, *phases)
    assert max(result.spans) == result.makespan
    assert max(result.peak) == peak(name, p, v, m) * v


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zbv_has_no_bubble_between_first_and_last_action_of_a_rank(p: int, m: int) -> None:
    result = run("zb-v", p, 2, m, (12, 12, 12))
    assert max(result.spans) == m * 36
    assert result.makespan - m * 36 == bubble("zb-v", p, 2, 12, 12, 12)  # the last rank begins so much later
    assert max(result.peak) == peak("zb-v", p, 2, m) * 2


def test_zbv_with_unequal_phases() -> None:
    result = run("zb-v", 4, 2, 16, (60, 72, 48))
    assert result.makespan - 16 * 180 == 1.8 * 60
    assert max(result.spans) - 16 * 180 == 1.2 * 60


@pytest.mark.parametrize("m", range(5, 16))
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_of_any_number_of_micro_batches_has_the_bubble_of_a_multiple(m: int, v: int) -> None:
    """The bubble stays small at the cost of memory: rounds are of g micro-batches instead of p."""
    result = run("interleaved", 4, v, m, (12, 12, 12))
    g = -(-m // (m // 4))
    assert result.bubble == bubble("interleaved", 4, v, 12, 12, 12)
    assert max(result.peak) == min((v - 1) * g + 2 * 3 + 1, v * m)


def test_one_rank_has_no_bubble() -> None:
    assert run("1f1b", 1, 1, 5, (1, 2, 3)).makespan == 30


def _random_chain(rng: random.Random, most: int) -> tuple[StageGraph, int, int]:
    p = rng.randint(2, most)
    m = rng.randint(1, 4 * p if most > 4 else 6)
    return make_chain_graph([Stage(*(rng.randint(1, 50) for _ in range(3))) for _ in range(p)]), p, m


def _check_bounds(count: int, most: int) -> None:
    rng = random.Random(count)
    for _ in range(count):
        graph, p, m = _random_chain(rng, most)
        work = [stage.work for stage in graph.stages]
        least = max(sum(work[:i]) + m * work[i] for i in range(p))
        alternating = simulate_schedule(make_schedule("1f1b", p, p, m), graph).makespan
        assert least <= alternating
        alike = make_chain_graph([Stage(stage.forward, stage.forward, stage.forward) for stage in graph.stages])
        work_alike = [stage.work for stage in alike.stages]
        if m >= p:  # and if all stages have the same ratio of forward and backward; else it may take a little more
            assert simulate_schedule(make_schedule("1f1b", p, p, m), alike).makespan <= sum(work_alike) + (m - 1) * max(
                work_alike
            )
        slowest = max(s.forward for s in graph.stages) + max(s.backward for s in graph.stages)
        simple = simulate_schedule(make_schedule("simple", p, p, m), graph).makespan
        assert simple == sum(work) + (m - 1) * slowest >= least
        # Halves of a backward may overlap with other ranks' backward, but not with the forwards before.
        least_split = max(sum(s.forward for s in graph.stages[:i]) + m * work[i] for i in range(p))
        assert simulate_schedule(make_schedule("zb-h1", p, p, m), graph).makespan >= least_split


def test_no_step_is_shorter_than_the_lower_bound() -> None:
    _check_bounds(500, most=4)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_no_step_of_ten_thousand_is_shorter_than_the_lower_bound() -> None:
    _check_bounds(10_000, most=8)


@settings(max_examples=15)
@given(pipelines(), st.booleans())
def test_every_action_starts_as_soon_as_it_may(pipeline: tuple[Schedule, StageGraph], lowered: bool) -> None:
    """There is only one timeline in which each action waits for nothing but its rank and its inputs."""
    schedule, graph = pipeline
    link = Link(latency=3.0)
    links = make_uniform_links(len(schedule.ranks), link)
    result = simulate_schedule(lower_schedule(schedule, graph) if lowered else schedule, graph, links=links)
    ends = {event.action: event.end for event in result.timeline}
    for rank, actions in enumerate(schedule.ranks):
        events = [event for event in result.timeline if event.rank == rank]
        assert [event.action for event in events] == list(actions)
        free = dict(zip([event.action for event in events[1:]], [event.end for event in events], strict=False))
        for event in events:
            needs = [
                _end(ends, stage, event.action.microbatch, gradient)
                + (link.latency if schedule.placement[stage] != rank else 0.0)
                for stage, gradient in _needs(event.action, graph)
            ]
            assert event.start == max([free.get(event.action, 0.0), *needs])


def _needs(action: Action, graph: StageGraph) -> Iterator[tuple[int, bool]]:
    """Stages whose forward, or whose input gradient, an action needs: said again, in the simplest way."""
    if action.kind is ActionKind.WEIGHT_GRAD:
        yield action.stage, True
    elif action.kind is ActionKind.FORWARD:
        yield from ((edge.source, False) for edge in graph.edges if action.stage in edge.targets)
    else:
        yield action.stage, False
        for edge in graph.edges:
            if edge.source == action.stage and edge.gradient:
                yield from ((user, True) for user in edge.targets)


def _end(ends: dict[Action, float], stage: int, microbatch: int, gradient: bool) -> float:
    kinds = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD) if gradient else (ActionKind.FORWARD,)
    return next(ends[Action(kind, stage, microbatch)] for kind in kinds if Action(kind, stage, microbatch) in ends)


def test_devices_of_other_speeds_take_other_times() -> None:
    result = simulate_schedule(
        make_schedule("1f1b", 2, 2, 4), make_chain_graph([Stage(1, 1, 1)] * 2), [Device(1.0), Device(0.5)]
    )
    assert result.busy == (12.0, 24.0)
    assert (
        result.makespan == 24.0 + 3.0
    )  # the slow rank never waits but for the first forward, and ends one backward early
    assert result.bubble == 3.0


def test_a_link_carries_one_message_after_the_other() -> None:
    graph = StageGraph((Stage(1, 1, 1),) * 2, (Edge("a", 0, (1,), 30), Edge("b", 0, (1,), 30, gradient=False)))
    result = simulate_schedule(make_schedule("simple", 2, 2, 1), graph, links=make_uniform_links(2, Link(10.0, 0.5)))
    forward = next(event for event in result.timeline if event.rank == 1)
    assert forward.start == 1 + 3 + 3 + 0.5  # the wire twice, the way once: it is full while the first is on its way
    assert result.waiting == (30, 60)


def test_overlapped_messages_cost_fill_and_drain_only() -> None:
    graph = make_chain_graph([Stage(10, 10, 10)] * 4, size=1)
    free = simulate_schedule(make_schedule("1f1b", 4, 4, 1), graph)
    slow = simulate_schedule(make_schedule("1f1b", 4, 4, 1), graph, links=make_uniform_links(4, Link(1.0)))
    assert slow.makespan == free.makespan + 2 * 3 * 1


@pytest.mark.parametrize("m", [1, 4, 16])
def test_messages_cost_fill_and_drain_and_what_holds_up_the_alternation(m: int) -> None:
    """In between, a round trip for each micro-batch; if they block, a rank also stands in its four messages of it."""
    graph, links = make_chain_graph([Stage(10, 10, 10)] * 4, size=1), make_uniform_links(4, Link(1.0))
    schedule = lower_schedule(make_schedule("1f1b", 4, 4, m), graph)
    free, overlapped = (
        simulate_schedule(schedule, graph).makespan,
        simulate_schedule(schedule, graph, links=links).makespan,
    )
    blocked = simulate_schedule(schedule, graph, links=links, blocking=True)
    assert 6 <= overlapped - free <= 6 + 2 * m
    assert overlapped <= blocked.makespan <= free + 6 + 4 * m
    for rank in range(4):
        events = [event for event in blocked.timeline if event.rank == rank]
        assert all(before.end <= after.start for before, after in pairwise(events))


@settings(max_examples=10)
@given(pipelines())
def test_overlapped_messages_are_never_slower_than_blocking_ones(pipeline: tuple[Schedule, StageGraph]) -> None:
    schedule, graph = pipeline
    lowered, links = lower_schedule(schedule, graph), make_uniform_links(len(schedule.ranks), Link(2.0))
    overlapped = simulate_schedule(lowered, graph, links=links)
    assert overlapped.makespan <= simulate_schedule(lowered, graph, links=links, blocking=True).makespan
    assert overlapped == simulate_schedule(schedule, graph, links=links)


def test_memory_over_time_reaches_the_peak_and_ends_empty() -> None:
    graph = make_chain_graph([Stage(1, 1, 1, activation=7)] * 4)
    result = simulate_schedule(make_schedule("zb-h1", 4, 4, 6), graph)
    for rank in range(4):
        curve = trace_memory(result, graph, rank)
        assert max(kept for _, kept in curve) == result.peak[rank]
        assert curve[-1][1] == 0
        assert [at for at, _ in curve] == sorted(at for at, _ in curve)


def test_computations_that_wait_for_each_other_are_told() -> None:
    schedule = parse_schedule("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0\n")
    with pytest.raises(PipelineError, match=r"rank 0 at 0B0 .* waits for gradient of 'v0' .* rank 1 at 1F1"):
        simulate_schedule(schedule, make_chain_graph([Stage()] * 2))


def test_wrong_numbers_of_devices_and_links_are_refused() -> None:
    schedule, graph = make_schedule("simple", 2, 2, 1), make_chain_graph([Stage()] * 2)
    with pytest.raises(PipelineError, match="1 devices for 2 ranks"):
        simulate_schedule(schedule, graph, [Device()])
    with pytest.raises(PipelineError, match="2 rows of 2"):
        simulate_schedule(schedule, graph, links=make_uniform_links(3, Link()))
    with pytest.raises(PipelineError, match="lower the schedule first"):
        simulate_schedule(schedule, graph, blocking=True)
    with pytest.raises(PipelineError, match="is for 2 stages, the model has 3"):
        simulate_schedule(schedule, make_chain_graph([Stage()] * 3))


def test_what_an_action_needs_is_said_by_the_rank_it_comes_from() -> None:
    graph = StageGraph((Stage(),) * 4, (Edge("v", 0, (1, 2, 3)),))
    flow = Flow(graph, (0, 1, 0, 1))
    assert flow.needs(Action(ActionKind.FORWARD, 2, 5)) == [Done(0, 5, False)]
    assert flow.needs(Action(ActionKind.BACKWARD, 0, 5)) == [
        Done(0, 5, False),
        Message("v", 5, True, 1, 0),
        Done(2, 5, True),
    ]
    assert flow.gives(Action(ActionKind.INPUT_GRAD, 3, 5), {Done(3, 5, True)}) == []
    assert flow.gives(Action(ActionKind.INPUT_GRAD, 1, 5), {Done(3, 5, True), Done(1, 5, True)}) == [
        Message("v", 5, True, 1, 0)
    ]


def test_links_are_those_ranks_between_which_something_is_sent() -> None:
    line = Flow(make_chain_graph([Stage()] * 16), tuple(range(16)))
    assert len(line.links) == 2 * 15  # of 240 pairs: values one way, gradients the other
    graph = StageGraph((Stage(),) * 4, (Edge("v", 0, (1, 2, 3)), Edge("mask", 1, (3,), gradient=False)))
    assert Flow(graph, (0, 1, 0, 1)).links == ((0, 1), (1, 0))
    assert Flow(graph, (0, 1, 2, 3)).links == ((0, 1), (0, 2), (0, 3), (1, 0), (1, 3), (2, 0), (3, 0))
    assert Flow(graph, (0, 0, 0, 0)).links == ()


def test_a_message_holds_a_rank_that_computes_and_costs_one_that_waits_nothing() -> None:
    stages = make_chain_graph([Stage(1.0, 1.0, 0.0), Stage(1.0, 1.0, 0.0)], size=10)
    free, held = Link(bandwidth=100.0), Link(bandwidth=100.0, held=0.5)  # a tenth of a second for each message

    def step(link: Link, schedule: str, microbatches: int) -> float:
        return simulate_schedule(
            make_schedule(schedule, 2, 2, microbatches), stages, None, make_uniform_links(2, link)
        ).makespan

    # Whoever sends has nothing else to do then, and who gets it waits.
    assert step(held, "simple", 1) == pytest.approx(step(free, "simple", 1))
    # The second forward of rank 0 begins late by what the first message takes of it, and so on.
    assert step(held, "simple", 3) == pytest.approx(step(free, "simple", 3) + 4 * 0.05)
