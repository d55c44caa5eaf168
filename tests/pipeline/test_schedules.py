"""Schedules have names and a text; each computes everything once, and holds no more than it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Stage, StageGraph, make_chain_graph
from everstep.pipeline.schedules import (
    NAMES,
    ActionKind,
    Schedule,
    compute_peak_memory,
    dump_schedule,
    find_schedule,
    in_flight,
    lower_schedule,
    make_schedule,
    parse_schedule,
    validate_schedule,
)
from tests.pipeline.random_pipelines import pipelines


@settings(max_examples=10)
@given(pipelines())
def test_a_schedule_comes_back_from_its_text(pipeline: tuple[Schedule, StageGraph]) -> None:
    schedule, graph = pipeline
    for each in (schedule, lower_schedule(schedule, graph)):
        assert parse_schedule(dump_schedule(each)) == each


def test_a_file_of_computations_as_torch_writes_them_is_a_schedule() -> None:
    """The lines of torch.distributed.pipelining's `_dump_csv` of 1F1B for two stages and two micro-batches."""
    schedule = parse_schedule("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n", name="mine")
    assert schedule == replace(make_schedule("1f1b", 2, 2, 2), name="mine", ranks=schedule.ranks)
    assert (
        validate_schedule(lower_schedule(schedule, make_chain_graph([Stage()] * 2)), make_chain_graph([Stage()] * 2))
        is None
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0F0 0B0\n1F0 1X0", r"line 2: '1X0' is no action"),
        ("0F0 0S0:v 0B0", "'0S0:v' is no action"),
        ("0F0 0S0<1:v 0B0\n1F0 1B0", "'0S0<1:v' is no action"),
        ("0F0 0B0 1F0\n1F1", "stage 1 is on ranks 0 and 1"),
        ("0F0 0B0\n2F0 2B0", "without gaps"),
        ("", "without gaps"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused_with_the_place(text: str, why: str) -> None:
    with pytest.raises(PipelineError, match=why):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "microbatches", "why"),
    [
        ("2f2b", 4, 4, 8, "there is no schedule '2f2b'; choose one of simple, 1f1b"),
        ("1f1b", 6, 4, 8, "are not a multiple of 4 ranks"),
        ("1f1b", 8, 4, 8, "take 4 stages, or interleaved"),
        ("zb-v", 4, 4, 8, "take 8 stages, or zb-h1"),
        ("simple", 4, 4, 0, "each must be 1 or more"),
    ],
)
def test_a_schedule_that_cannot_be_says_what_can(
    name: str, stages: int, ranks: int, microbatches: int, why: str
) -> None:
    with pytest.raises(PipelineError, match=why):
        make_schedule(name, stages, ranks, microbatches)


@pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
def test_1f1b_holds_as_many_micro_batches_as_there_are_stages_from_here_on(microbatches: int) -> None:
    schedule = make_schedule("1f1b", 4, 4, microbatches)
    assert in_flight(schedule) == tuple(min(4 - stage, microbatches) for stage in range(4))


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_zero_bubble_holds_no_more_than_1f1b(name: str) -> None:
    stages = 8 if name == "zb-v" else 4
    assert (
        max(compute_peak_memory(make_schedule(name, stages, 4, 16), make_chain_graph([Stage(activation=1)] * stages)))
        == stages
    )


@pytest.mark.parametrize("name", NAMES)
def test_stages_that_may_not_split_have_full_backward(name: str) -> None:
    stages = 4 * (find_schedule(name).chunks or 2)
    schedule, whole = (make_schedule(name, stages, 4, 5, split=split) for split in ({0, 3}, None))

    def list_split_stages(schedule: Schedule) -> set[int]:
        halves = (ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
        return {action.stage for rank in schedule.ranks for action in rank if action.kind in halves}

    assert list_split_stages(schedule) == list_split_stages(whole) & {0, 3}
