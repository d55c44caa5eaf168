"""No split is below what is certified, by formula or simulated; the mixed-integer programme agrees with the search."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.partition.blocks import assign_nodes
from everstep.pipeline.partition.certificate import compute_bound
from everstep.pipeline.partition.limit import LowerBound
from everstep.pipeline.partition.solve import search_splits
from tests.pipeline.mixed_integer import prove_bound
from tests.pipeline.partition_cases import case, seen, splits, worth

CASES = [seed for seed in range(60) if case(seed).devices[0].memory is None]


def test_no_split_is_below_the_bound() -> None:
    for seed in CASES:
        given = case(seed)
        stages = len(given.devices)
        values = [worth(given, split) for split in splits(given.graph, stages)]
        if values:
            assert compute_bound(given.problem) <= min(values) * (1 + 1e-9)


@pytest.mark.parametrize("most", [2500, 6, 1])
def test_no_split_is_simulated_below_the_limit_however_many_downsets_are_searched(most: int) -> None:
    for seed in range(0, 60, 3):
        given = case(seed)
        try:
            problem = given.problem
        except PipelineError:
            continue
        values = [seen(given, split) for split in splits(given.graph, len(given.devices))]
        assert LowerBound(problem, inf, most).bound <= min(values, default=inf) * (1 + 1e-9), seed


def test_where_splits_are_few_the_limit_is_the_best_of_all() -> None:
    """All that the bounds of stages do not exclude are told, to be simulated."""
    for seed in CASES[:20]:
        given = case(seed)
        if given.memory_weight or not given.links:
            continue
        best = min(seen(given, split) for split in splits(given.graph, len(given.devices)))
        near, beyond = LowerBound(given.problem, best, 2500).near(best, 400)
        assert beyond == best
        assert all(seen(given, assign_nodes(given.problem.blocks, split)) >= best * (1 - 1e-9) for split in near)


def test_the_programme_and_the_search_agree() -> None:
    pytest.importorskip("scipy")
    agreed = 0
    for seed in range(10):
        given = case(seed)
        try:
            problem = given.problem
        except PipelineError:
            continue
        found, least = search_splits(problem)
        if not found:
            with pytest.raises(PipelineError, match="no split fits"):
                prove_bound(problem)
            continue
        proven = prove_bound(problem)
        assert proven.stages is not None
        assert problem.judge(proven.stages).objective == pytest.approx(least, rel=1e-5)
        assert proven.bound == pytest.approx(least, rel=1e-5)
        agreed += 1
    assert agreed > 4


def test_a_programme_that_is_stopped_early_still_bounds() -> None:
    pytest.importorskip("scipy")
    problem = case(3).problem
    assert prove_bound(problem, seconds=1e-3).bound <= search_splits(problem)[1] * (1 + 1e-6)


def test_the_programme_knows_one_stage_on_each_rank() -> None:
    problem = case(3).problem
    with pytest.raises(PipelineError, match="one stage on each rank"):
        prove_bound(replace(problem, placement=(0,) * problem.stages))
