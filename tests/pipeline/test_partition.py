"""The split that is found is the best one there is by the formula of the search: against all splits of small graphs."""

from __future__ import annotations

from math import inf

import pytest

from everstep.pipeline.partition.blocks import assign_nodes
from everstep.pipeline.partition.solve import search_splits
from tests.pipeline.partition_cases import case, splits, worth


def optimum_is_found(seed: int) -> None:
    given = case(seed)
    stages = len(given.devices)
    best = min((worth(given, split) for split in splits(given.graph, stages)), default=inf)
    try:
        problem = given.problem
    except ValueError:
        assert best == inf, "refused, but there are splits"
        return
    found, bound = search_splits(problem)
    if best == inf:
        assert not found
        return
    assert found, "there are splits that fit"
    assert worth(given, assign_nodes(problem.blocks, found[0])) == pytest.approx(best, rel=1e-9)
    assert problem.judge(found[0]).objective == pytest.approx(best, rel=1e-9)
    assert bound == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("first", range(0, 150, 10))
def test_the_best_split_is_found(first: int) -> None:
    for seed in range(first, first + 10):
        optimum_is_found(seed)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_the_best_split_is_found_for_a_thousand_graphs() -> None:
    for seed in range(1000, 2000):
        optimum_is_found(seed)
