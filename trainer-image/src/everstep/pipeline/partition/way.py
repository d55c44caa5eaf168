"""Bound from below the time of one micro-batch on its way through the graph, whatever the stages are."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from everstep.pipeline.graph import Link
from everstep.pipeline.partition.blocks import Blocks, BlockValue
from everstep.pipeline.partition.problem import PartitionProblem


class CriticalPath:
    """Seconds, on the fastest devices. `came[b]`: to the end of block b's forward; `gone[b]`: from the start of b's
    backward to the end of what depends on it; `down[b]`: from the start of b's forward to the end of its backward."""

    def __init__(self, problem: PartitionProblem) -> None:
        blocks, speed, whole = problem.blocks.blocks, max(problem.speed), not any(problem.split)
        forward = [block.forward / speed for block in blocks]
        backward = [(block.input_grad + block.weight_grad * whole) / speed for block in blocks]
        both = [first + second for first, second in zip(forward, backward, strict=True)]
        count, beside = len(blocks), (problem.stages - 1) // 2
        before = _list_edges(problem.blocks, gradient=False)
        learning = _list_edges(problem.blocks, gradient=True)
        self.link = _find_best_link(problem)
        self.came = compute_lengths(before, range(count), forward, beside)
        # Of what leads to the end by values with gradients; of other blocks no more than themselves is known.
        ends = _list_ancestors(learning)
        self.gone = compute_lengths(learning, ends, backward, beside)
        after = [set[int]() for _ in range(count)]
        for index in ends:
            for each in learning[index]:
                after[each].add(index)
        self.down = compute_lengths(after, ends[::-1], both, beside)

    def over(self, value: BlockValue) -> float:
        """A value, or its gradient, over the best link."""
        return self.link.seconds(value.size) if value.size else 0.0


def compute_lengths(
    before: Sequence[set[int]], order: Sequence[int], weight: Sequence[float], beside: int
) -> list[float]:
    """The least time until each block of `order` is done, if all that is before it must be; others take their own.

    What lies between two blocks that every other is before or after is done in turn, unless two whole stages lie in
    it: only then, which can be so for no more than `beside` of such parts, is the longest path the least.
    """
    found = list(weight)
    turns = _find_bottlenecks(before, order)
    passed, saved = 0.0, [0.0] * beside  # of all parts that are done; the most that can be saved, as a heap
    total, local = 0.0, dict[int, float]()  # of the part that is not
    for index in order:
        if index in turns:
            heapq.heappushpop(saved, total - max(local.values(), default=0.0))
            passed += total + weight[index]
            total, local = 0.0, {}
            found[index] = passed - sum(saved)
        else:
            local[index] = weight[index] + max((local[each] for each in before[index] if each in local), default=0.0)
            total += weight[index]
            found[index] = passed - sum(saved) + local[index]
    return found


def _find_bottlenecks(before: Sequence[set[int]], order: Sequence[int]) -> set[int]:
    """The blocks that every other of `order` is before or after."""
    above, below = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    for index in order:
        for each in before[index]:
            above[index] |= above[each] | 1 << each
    for index in reversed(order):
        for each in before[index]:
            below[each] |= below[index] | 1 << index
    return {index for index in order if above[index].bit_count() + below[index].bit_count() == len(order) - 1}


def _list_edges(blocks: Blocks, *, gradient: bool) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in blocks.blocks]
    for value in blocks.values:
        if value.gradient or not gradient:
            for consumer in value.consumers:
                found[consumer].add(value.producer)
    return found


def _list_ancestors(before: Sequence[set[int]]) -> list[int]:
    """Return the blocks from which the last block comes, and itself, ascending."""
    found = {len(before) - 1} if before else set[int]()
    for index in reversed(range(len(before))):
        if index in found:
            found |= before[index]
    return sorted(found)


def _find_best_link(problem: PartitionProblem) -> Link:
    if problem.links is None or problem.ranks == 1:
        return Link()
    ranks = range(problem.ranks)
    links = [problem.links[here][there] for here in ranks for there in ranks if here != there]
    return Link(max(link.bandwidth for link in links), min(link.latency for link in links))
