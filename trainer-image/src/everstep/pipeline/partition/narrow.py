"""Narrow the search once a split is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from everstep.pipeline.partition.problem import PartitionProblem

WINDOW = 1 / 8  # of the work of a stage: so far from a cut another one is looked for


def by_work(problem: PartitionProblem) -> tuple[int, ...]:
    """Blocks in their order, to each stage its device's share of the work, none empty."""
    import numpy as np

    count, stages = len(problem.blocks.blocks), problem.stages
    done = np.cumsum([block.work for block in problem.blocks.blocks])
    share = np.cumsum(problem.speed)[:-1] / sum(problem.speed)
    ends = np.searchsorted(done, share * done[-1]).tolist()
    for stage, end in enumerate(ends):
        ends[stage] = min(max(end, stage + 1, ends[stage - 1] + 1 if stage else 1), count - stages + stage + 1)
    return tuple(np.searchsorted(ends, range(count), side="right").tolist())


def bound_stage_work(problem: PartitionProblem, known: float) -> float:
    """Seconds of work, on a device of speed 1, that a stage has at most in a split whose objective is no more than
    `known`: a step is at least all of the work once, and the dearest stage m - 1 times."""
    second, _ = problem.rates
    if known == inf or not second or problem.microbatches == 1 or problem.ranks < problem.stages:
        return inf
    work, speed = sum(block.work for block in problem.blocks.blocks), max(problem.speed)
    return (speed * known / second - work) / (problem.microbatches - 1) * (1 + 1e-9)


def cuts_of(split: Sequence[int]) -> set[int]:
    """The downsets between the stages of a split."""
    found = [0] * max(split)
    for block, at in enumerate(split):
        for stage in range(at, len(found)):
            found[stage] |= 1 << block
    return set(found)


def find_near_downsets(problem: PartitionProblem, lines: Sequence[Sequence[int]], split: Sequence[int]) -> set[int]:
    """Return the downsets of about as much work as what is before a cut of a split.

    Args:
        problem: The partition problem.
        lines: Sequences of growing downsets, each with one block or more than the one before.
        split: The stage of each block.
    """
    import numpy as np

    each = np.array([block.work for block in problem.blocks.blocks])
    cuts = np.cumsum(np.bincount(split, each, problem.stages))[:-1]
    found = set[int]()
    for line in lines:
        new = [(larger & ~lower).bit_length() - 1 for lower, larger in pairwise(line)]
        work = np.concatenate([[0.0], np.cumsum(each[new])])
        apart = np.abs(work[:, None] - cuts[None, :]).min(axis=1, initial=inf)
        found |= {line[index] for index in np.flatnonzero(apart <= WINDOW * work[-1] / problem.stages).tolist()}
    return found
