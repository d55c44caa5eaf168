"""Bound the objective of every split from below, without search."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.pipeline.partition.problem import PartitionProblem


def compute_bound(problem: PartitionProblem) -> float:
    """Return a lower bound on the objective of every split, without a search.

    The dearest stage has at least the heaviest block and, work being divided freely, its device's share of all. Links
    between k stages of a connected graph carry k - 1 values or more.
    """
    work = [block.work for block in problem.blocks.blocks]
    speeds = sorted(problem.speed, reverse=True)
    ranks = sum(dict(zip(problem.placement, problem.speed, strict=True)).values())
    least = max(sum(work) / ranks, max(work) / speeds[0])
    # Least sum + (m - 1) · max over the max: a piecewise linear convex function, so at one of its corners.
    corners = [least] + [corner for corner in _list_corners(sum(work), speeds) if corner > least]
    seconds = min(
        _compute_quickest(sum(work), speeds, corner) + (problem.microbatches - 1) * corner for corner in corners
    )
    return problem.objective(seconds + _bound_by_links(problem), bound_memory(problem))


def _list_corners(work: float, speeds: Sequence[float]) -> list[float]:
    return [work / sum(speeds[:count]) for count in range(1, len(speeds) + 1)]


def _compute_quickest(work: float, speeds: Sequence[float], most: float) -> float:
    """The least sum of times when no stage takes longer than `most`: the fastest are filled first."""
    total = 0.0
    for speed in speeds:
        part = min(work, speed * most)
        total += part / speed
        work -= part
    return total


def _bound_by_links(problem: PartitionProblem) -> float:
    if problem.stages == 1 or not _is_connected(problem):
        return 0.0
    return (problem.stages - 1) * min(hop.seconds(value) for hop in problem.hops for value in problem.blocks.values)


def _is_connected(problem: PartitionProblem) -> bool:
    parts = list(range(len(problem.blocks.blocks)))

    def find(item: int) -> int:
        while parts[item] != item:
            item = parts[item]
        return item

    for value in problem.blocks.values:
        for consumer in value.consumers:
            parts[find(consumer)] = find(value.producer)
    return len({find(item) for item in parts}) == 1


def bound_memory(problem: PartitionProblem) -> float:
    """Return the bytes that the fullest rank has at least: work is divided freely, but a block is whole."""
    blocks, kept = problem.blocks.blocks, min(problem.in_flight)
    optimizer_factor = 1 + problem.optimizer_factor
    shared = problem.blocks.shared
    each = [
        (block.parameters + sum(shared[number] for number in block.shared)) * optimizer_factor + block.activation * kept
        for block in blocks
    ]
    used = {number for block in blocks for number in block.shared}
    total = sum(block.parameters * optimizer_factor + block.activation * kept for block in blocks)
    total += sum(shared[number] for number in used) * optimizer_factor
    return max(max(each), total / problem.ranks)
