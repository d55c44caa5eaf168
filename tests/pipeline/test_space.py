"""Tables for all pairs of downsets hold what each pair gives by itself."""

from __future__ import annotations

import random
from math import inf

import pytest

np = pytest.importorskip("numpy")

from everstep.pipeline.partition import space as module  # noqa: E402
from everstep.pipeline.partition.blocks import Blocks, BlockValue, contract_graph  # noqa: E402
from everstep.pipeline.partition.core import Core  # noqa: E402
from everstep.pipeline.partition.space import Space, list_downsets  # noqa: E402
from tests.pipeline.partition_cases import dag  # noqa: E402


def graph(seed: int, nodes: int = 9) -> Blocks:
    return contract_graph(dag(random.Random(seed), nodes))


def members(space: Space, pair: int) -> tuple[set[int], set[int]]:
    """The blocks before a pair, and those before and between."""
    low, high = (space.downsets[each[pair]] for each in (space.lower, space.upper))
    everything = range(len(space.blocks.blocks))
    return {each for each in everything if low >> each & 1}, {each for each in everything if high >> each & 1}


def receives(value: BlockValue, low: set[int], high: set[int]) -> bool:
    return value.producer in low and bool(set(value.consumers) & (high - low))


def gives(value: BlockValue, low: set[int], high: set[int]) -> bool:
    return value.producer in high - low and not set(value.consumers) <= high


@pytest.mark.parametrize("seed", range(8))
def test_sums_over_values_are_those_of_each_pair(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 5)
    blocks = graph(seed)
    space = Space(blocks, list_downsets(blocks, 1000) or ())
    came, gone = space.incoming(lambda each: each.size / 3), space.outgoing(lambda each: each.size / 3)
    for pair in range(len(space.upper)):
        low, high = members(space, pair)
        assert came[pair] == pytest.approx(sum(each.size / 3 for each in blocks.values if receives(each, low, high)))
        assert gone[pair] == pytest.approx(sum(each.size / 3 for each in blocks.values if gives(each, low, high)))
        # What carries nothing is exactly nothing: bounds ask whether there is a value at all.
        assert bool(came[pair]) == any(receives(each, low, high) for each in blocks.values)


@pytest.mark.parametrize("most", [inf, 4.0])
def test_pairs_are_all_in_which_one_lies_in_the_other(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 5)
    blocks = graph(3)
    found = Space(blocks, list_downsets(blocks, 1000) or (), most)
    work = [sum(block.work for at, block in enumerate(blocks.blocks) if each >> at & 1) for each in found.downsets]
    wanted = [
        (high, low)
        for high, large in enumerate(found.downsets)
        for low, small in enumerate(found.downsets)
        if small != large and small & ~large == 0 and work[high] - work[low] <= most
    ]
    assert list(zip(found.upper.tolist(), found.lower.tolist(), strict=True)) == wanted
    assert wanted


@pytest.mark.parametrize("seed", [12, 24, 42])
def test_pairs_with_just_as_much_work_as_they_may_have_are_in(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 1)
    blocks = graph(seed, 12)
    every = Space(blocks, list_downsets(blocks, 2000) or ())
    work = every.total(np.array([block.work for block in blocks.blocks]))
    between = work[every.upper] - work[every.lower]
    for most in np.unique(between)[:: max(1, len(np.unique(between)) // 6)]:
        found = Space(blocks, every.downsets, most)
        assert len(found.upper) == np.count_nonzero(between <= most)


def test_the_graph_without_its_loose_blocks_is_made_once() -> None:
    core = Core(graph(2, 30), 20, 20)
    assert core.loose
    assert core.blocks is core.blocks
