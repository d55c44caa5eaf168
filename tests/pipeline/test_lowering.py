"""Lowering adds what must be told, once, where it is there, and changes nothing of what is computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Edge, Stage, StageGraph, make_chain_graph
from everstep.pipeline.schedules import (
    Action,
    ActionKind,
    Schedule,
    lower_schedule,
    make_schedule,
    parse_schedule,
    simulate_schedule,
)
from everstep.pipeline.schedules.actions import COMPUTE, MESSAGES
from tests.pipeline.random_pipelines import pipelines


def tokens(schedule: Schedule, rank: int, *kinds: ActionKind) -> list[str]:
    return [str(action) for action in schedule.ranks[rank] if action.kind in kinds]


@settings(max_examples=15)
@given(pipelines())
def test_what_is_computed_stays_and_each_value_goes_once_to_each_rank(pipeline: tuple[Schedule, StageGraph]) -> None:
    schedule, graph = pipeline
    lowered = lower_schedule(schedule, graph)
    for before, after in zip(schedule.ranks, lowered.ranks, strict=True):
        assert before == tuple(action for action in after if action.kind in COMPUTE)
    sent = Counter(
        (
            action.value,
            action.microbatch,
            action.gradient,
            schedule.placement[action.stage],
            schedule.placement[action.peer],
        )
        for actions in lowered.ranks
        for action in actions
        if action.kind is ActionKind.SEND
    )
    expected = set()
    for edge in graph.edges:
        home = schedule.placement[edge.source]
        for rank in {schedule.placement[stage] for stage in edge.targets} - {home}:
            for microbatch in range(schedule.microbatches):
                expected.add((edge.value, microbatch, False, home, rank))
                if edge.gradient:
                    expected.add((edge.value, microbatch, True, rank, home))
    assert sent == dict.fromkeys(expected, 1)


@settings(max_examples=10)
@given(pipelines())
def test_the_order_follows_from_the_structure_alone(pipeline: tuple[Schedule, StageGraph]) -> None:
    """Ranks lower for themselves, with profiles of their own."""
    schedule, graph = pipeline
    other = replace(graph, stages=tuple(Stage(stage + 1.0, 2.0, 0.0, 9) for stage in range(schedule.stages)))
    assert lower_schedule(schedule, graph) == lower_schedule(schedule, other)


def test_a_value_of_several_users_on_a_rank_goes_to_the_first_and_comes_back_from_the_last() -> None:
    graph = StageGraph((Stage(),) * 4, (*make_chain_graph([Stage()] * 4).edges, Edge("skip", 0, (1, 3))))
    schedule = lower_schedule(make_schedule("simple", 4, 2, 1), graph)  # stages 1 and 3 are on rank 1
    assert tokens(schedule, 0, ActionKind.SEND)[:2] == ["0S0>1:v0", "0S0>1:skip"]
    assert "3R0<0:skip" not in tokens(schedule, 1, ActionKind.RECEIVE)
    assert tokens(schedule, 1, ActionKind.SEND)[-2:] == ["1S0>0^v0", "1S0>0^skip"]
    rank = [str(action) for action in schedule.ranks[1]]
    assert rank.index("1S0>0^skip") > max(rank.index("1B0"), rank.index("3B0"))


def test_what_stays_on_its_rank_is_not_sent() -> None:
    graph = make_chain_graph([Stage()] * 8)
    schedule = lower_schedule(make_schedule("zb-v", 8, 4, 4), graph)  # stages 3 and 4 are on rank 3
    values = {action.value for actions in schedule.ranks for action in actions if action.kind in MESSAGES}
    assert values == {"v0", "v1", "v2", "v4", "v5", "v6"}


def test_a_value_without_gradient_has_none_sent_back() -> None:
    graph = StageGraph((Stage(),) * 2, (Edge("v0", 0, (1,)), Edge("mask", 0, (1,), gradient=False)))
    assert tokens(lower_schedule(make_schedule("simple", 2, 2, 1), graph), 1, ActionKind.SEND) == ["1S0>0^v0"]


def test_stages_are_reduced_right_after_their_last_weight_gradient() -> None:
    schedule = lower_schedule(make_schedule("zb-interleaved", 8, 4, 4), make_chain_graph([Stage()] * 8))
    for rank, actions in enumerate(schedule.ranks):
        listed = [str(action) for action in actions if action.kind not in MESSAGES]
        for stage in schedule.stages_of(rank):
            assert listed[listed.index(f"{stage}D") - 1] == f"{stage}W3"
    assert not any(
        tokens(
            lower_schedule(make_schedule("1f1b", 4, 4, 4), make_chain_graph([Stage()] * 4), reduce=False),
            0,
            ActionKind.REDUCE,
        )
    )


def test_ties_wait_for_all_owners_and_stand_in_one_order_on_all_ranks() -> None:
    graph = replace(make_chain_graph([Stage()] * 8), ties=(("a", (0, 7)), ("b", (0, 3, 7)), ("c", (1, 2))))
    schedule = lower_schedule(make_schedule("interleaved", 8, 4, 4), graph)
    assert tokens(schedule, 0, ActionKind.TIE)[-2:] == ["0T:a", "0T:b"]
    assert tokens(schedule, 3, ActionKind.TIE) == ["7T:a", "3T:b"]
    assert tokens(schedule, 1, ActionKind.TIE) == ["1T:c"]
    assert tokens(schedule, 2, ActionKind.TIE) == ["2T:c"]
    for rank in (0, 3):  # stage 0 is last: no computation and no reduction is behind its ties
        assert all(action.kind is ActionKind.TIE for action in schedule.ranks[rank][-2:])


def test_owners_of_one_rank_have_one_tie() -> None:
    graph = replace(make_chain_graph([Stage()] * 4), ties=(("w", (0, 2)),))
    assert tokens(lower_schedule(make_schedule("interleaved", 4, 2, 2), graph), 0, ActionKind.TIE) == ["0T:w"]


def test_a_receive_is_posted_before_its_message_is_sent_when_all_stages_are_alike() -> None:
    """So that a rendezvous costs nothing there: no more time than without any message."""
    for name in ("1f1b", "zb-h1", "simple"):
        graph = make_chain_graph([Stage(2, 2, 2)] * 4)
        computed = make_schedule(name, 4, 4, 8)
        assert (
            simulate_schedule(lower_schedule(computed, graph), graph, blocking=True).makespan
            == simulate_schedule(computed, graph).makespan
        )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0F0 0B0 0D\n1F0 1B0", "contains sends already"),
        ("0F0 0B0\n1F0", "1B0 is missing"),
        ("0F0 0B0\n1F0 1I0", "1W0 is missing"),
        ("0F0 0B0\n1F0 1B0 1B0", "rank 1, action 2: 1B0: is there twice"),
        ("0F0 0B0\n1F0 1I0 1B0", "there is a backward already: 1I0"),
        ("0F0 0B0\n1B0 1F0", "1B0: comes before the forward of stage 1"),
        ("0F0 0B0\n1F0 1W0 1I0", "1W0: comes before the backward of stage 1"),
        ("0F0 1F0 0B0 1B0", "0B0: comes before the backward of stage 1, which is on the same rank"),
        ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "comes to a stand"),
    ],
)
def test_computations_that_are_not_right_are_refused(text: str, why: str) -> None:
    with pytest.raises(PipelineError, match=why):
        lower_schedule(parse_schedule(text), make_chain_graph([Stage()] * 2))


def test_actions_of_no_stage_or_micro_batch_are_refused() -> None:
    graph, schedule = make_chain_graph([Stage()] * 2), make_schedule("simple", 2, 2, 1)
    for action, why in (
        (Action(ActionKind.FORWARD, 0, 0), "stage 0 is not on this rank"),
        (Action(ActionKind.FORWARD, 1, 1), "1 micro"),
    ):
        with pytest.raises(PipelineError, match=why):
            lower_schedule(replace(schedule, ranks=(schedule.ranks[0], (action, *schedule.ranks[1]))), graph)
    with pytest.raises(PipelineError, match="names ranks that are not there"):
        lower_schedule(replace(schedule, placement=(0, 2)), graph)
