"""The advisor takes the fastest schedule that fits, and says why it took it."""

from __future__ import annotations

import pytest

from everstep.pipeline.advise import advise
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Device, Link, Stage, StageGraph, make_chain_graph, make_uniform_links

GB = 10**9


def model(stages: int, microbatches: int) -> StageGraph:
    """24 s of each phase, 64 GB of activations and 4 GB of parameters, in equal shares."""
    each = 24 / stages / microbatches
    return make_chain_graph([Stage(each, each, each, 64 * GB // stages // microbatches, 4 * GB // stages)] * stages)


def devices(memory: float) -> list[Device]:
    return [Device(memory=int(memory * GB))] * 4


def test_with_room_for_all_the_fastest_is_taken() -> None:
    advice = advise(model, 4, (4, 8), schedules=("simple", "1f1b", "zb-h1"), chunks=(1,))
    assert (advice.choice.schedule, advice.choice.microbatches) == ("zb-h1", 8)
    assert advice.choice.seconds == pytest.approx((8 + 1) * 3 * 24 / 4 / 8)  # (m + (p - 1) / 3) · (F + B + W)
    assert [one.seconds for one in advice.alternatives] == sorted(one.seconds for one in advice.alternatives)
    assert len(advice.alternatives) == 6


def test_a_cap_on_memory_leaves_out_what_does_not_fit_and_says_so() -> None:
    advice = advise(model, 4, (8,), devices=devices(13.0), schedules=("1f1b", "zb-interleaved", "interleaved"))
    assert advice.choice.fits
    assert max(advice.choice.memory) <= 13 * GB
    refused = {one.schedule for one in advice.alternatives if not one.fits}
    assert refused == {"interleaved"}  # it holds p + (p - 1)/v micro-batches: 2 GB more and more
    assert all("needs" in one.why for one in advice.alternatives if not one.fits)


def test_what_would_be_faster_but_does_not_fit_is_told() -> None:
    advice = advise(model, 4, (8,), devices=devices(13.0), schedules=("1f1b", "interleaved"), chunks=(1, 2))
    assert advice.choice.schedule == "1f1b"
    told = " ".join(advice.reasons)
    assert "interleaved with 8 stages and 8 micro-batches would be" in told
    assert "faster, but rank 0 needs 15 GB, it has 13" in told


def test_among_equally_fast_ones_the_one_of_least_memory_is_taken() -> None:
    """GPipe takes the time of 1F1B, and holds all micro-batches."""
    advice = advise(model, 4, (16,), schedules=("simple", "1f1b"), chunks=(1,))
    assert advice.choice.schedule == "1f1b"
    assert "as fast, but no less memory" in advice.table()


def test_slow_links_speak_against_many_stages() -> None:
    def heavy(stages: int, microbatches: int) -> StageGraph:
        each = 24 / stages / microbatches
        return make_chain_graph([Stage(each, each, each)] * stages, size=GB // microbatches)

    def best(bandwidth: float) -> int:
        links = make_uniform_links(4, Link(bandwidth))
        return advise(heavy, 4, (8,), links=links, schedules=("1f1b", "interleaved")).choice.stages

    assert best(1e12) > best(5e7) == 4


def test_a_model_that_refuses_some_numbers_of_stages_is_advised_among_the_others() -> None:
    def short(stages: int, microbatches: int) -> StageGraph:
        if stages > 4:
            raise PipelineError("it has 5 layers")
        return model(stages, microbatches)

    advice = advise(short, 4, (8,), schedules=("1f1b", "zb-v"))
    assert advice.choice.stages == 4
    assert "zb-v with 8 stages and 8 micro-batches cannot be: it has 5 layers." in advice.reasons


def test_stages_that_may_not_split_are_simulated_so() -> None:
    whole = advise(model, 4, (8,), schedules=("zb-h1",), split=lambda stages, microbatches: ())
    halves = advise(model, 4, (8,), schedules=("zb-h1",))
    assert whole.choice.seconds > halves.choice.seconds


def test_where_nothing_fits_the_nearest_is_told() -> None:
    with pytest.raises(PipelineError, match=r"no schedule fits the memory; .* comes nearest, but rank . needs"):
        advise(model, 4, (8, 16), devices=devices(5.0))


def test_the_table_is_of_the_best_and_says_how_many_more_there_are() -> None:
    advice = advise(model, 4, (4, 8, 16))
    lines = advice.table(5).splitlines()
    assert len(lines) == 7
    assert lines[1].endswith("chosen")
    assert re_more(lines[-1]) == len(advice.alternatives) - 5


def re_more(line: str) -> int:
    return int(line.split()[2])
