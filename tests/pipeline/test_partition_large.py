"""A plan of a large graph takes seconds, whatever its shape: of this thread, since others may work beside the test."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from everstep.pipeline.graph import Device, Graph, GraphNode, Link, make_uniform_links
from everstep.pipeline.partition.solve import SplitCandidate, partition_graph

Inputs = Iterator[Sequence[int]]  # of each node


def chain(random_: random.Random) -> Inputs:
    """With short skips, and some from anywhere before."""
    index = 0
    while True:
        near = {index - 1} | ({index - 3} if index % 3 == 0 else set())
        far = {random_.randrange(index)} if index and index % 50 == 0 else set()
        yield [each for each in sorted(near | far) if each >= 0]
        index += 1


def cells(branches: int, depth: int) -> Callable[[random.Random], Inputs]:
    """As of attention or Inception: branches that meet, one after the other, with a residual around them."""

    def shape(_: random.Random) -> Inputs:
        yield []
        last = 0
        while True:
            for branch in range(branches):
                for step in range(depth):
                    yield [last + branch * depth + step if step else last]
            end = last + branches * depth + 1
            yield [last, *(last + (branch + 1) * depth for branch in range(branches))]
            last = end

    return shape


def near(random_: random.Random) -> Inputs:
    """Each node uses some of the twelve before it."""
    index = 0
    while True:
        before = range(max(0, index - 12), index)
        yield sorted(random_.sample(before, min(len(before), random_.choice((1, 1, 2, 3)))))
        index += 1


def anywhere(random_: random.Random) -> Inputs:
    """Each node uses some of all before it, so that hundreds of values cross each cut."""
    index = 0
    while True:
        yield sorted(random_.sample(range(index), min(index, random_.choice((1, 1, 2, 3)))))
        index += 1


SHAPES = {"chain": chain, "attention": cells(3, 1), "inception": cells(4, 3), "near": near, "anywhere": anywhere}


def planned(shape: str, nodes: int) -> SplitCandidate:
    random_ = random.Random(1)
    made = []
    for index, inputs in zip(range(nodes), SHAPES[shape](random_), strict=False):
        seconds = random_.lognormvariate(0, 1) * 1e-3
        names = tuple(f"n{each}" for each in inputs)
        made.append(
            GraphNode(f"n{index}", names, seconds, seconds, seconds, 1 << 20, 1 << 20, random_.randint(1, 1 << 20))
        )
    devices, links = [Device(memory=1 << 33)] * 8, make_uniform_links(8, Link(10e9, 1e-5))
    return partition_graph(Graph(tuple(made)), 8, devices, links, 16)[0]


@pytest.mark.parametrize(("shape", "gap"), [("chain", 0.001), ("attention", 0.05)])
def test_three_hundred_nodes_are_split_about_as_well_as_can_be(shape: str, gap: float) -> None:
    assert planned(shape, 300).gap < gap


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES)
def test_two_thousand_nodes_are_split_within_the_time_of_a_test(shape: str) -> None:
    gap = planned(shape, 2000).gap
    print(f"{shape}: at most {gap:.1%} above the best")
    assert gap < 1


@pytest.mark.chaos
def test_a_long_chain_is_split_as_well_as_can_be() -> None:
    assert planned("chain", 2000).gap < 0.001
