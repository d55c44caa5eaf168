"""Splits as others make them: evenly, by parameters, and as torchgpipe does; each over the parts of a graph in their
order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from everstep.pipeline.partition.blocks import Blocks

Splitter = Callable[[Blocks, int], tuple[int, ...]]


def even(blocks: Blocks, stages: int) -> tuple[int, ...]:
    """As many parts in each stage, as where a model's layers are counted."""
    count = len(blocks.blocks)
    return tuple(index * stages // count for index in range(count))


def by_parameters(blocks: Blocks, stages: int) -> tuple[int, ...]:
    """Make the heaviest stage as light as can be, by bytes of parameters (DeepSpeed's `parameters`)."""
    return balanced(
        [block.parameters + sum(blocks.shared[each] for each in block.shared) for block in blocks.blocks], stages
    )


def by_time(blocks: Blocks, stages: int) -> tuple[int, ...]:
    """torchgpipe's `balance_by_time`."""
    return number(block_partition([block.work for block in blocks.blocks], stages))


def number(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the stage of each part, from how many parts each stage has."""
    return tuple(stage for stage, length in enumerate(lengths) for _ in range(length))


def balanced(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """Contiguous stages whose largest sum is the least, none empty."""
    count = len(weights)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[i]: the least largest sum of the first i parts, in as many stages as rows were made
    best = [0.0] + [float("inf")] * count
    cuts: list[list[int]] = []
    for _ in range(stages):
        row, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            row[end], cut[end] = min((max(best[start], sums[end] - sums[start]), start) for start in range(end))
        best = row
        cuts.append(cut)
    lengths = []
    end = count
    for cut in reversed(cuts):
        lengths.append(end - cut[end])
        end = cut[end]
    return number(lengths[::-1])


def block_partition(weights: Sequence[float], stages: int) -> list[int]:
    """Lengths of contiguous blocks by the local moves of Bárány and Grinberg (arXiv 1308.2452), as torchgpipe has them.

    The weights are moved and scaled to 0 … 1 first, so that the bound of the theorem, a difference of one, is that of
    the largest element above the smallest: which is why sums are not what is balanced.
    """
    low, high = min(weights), max(weights)
    scaled = [(weight - low) / (high - low) if high > low else 0.0 for weight in weights]
    ends = [len(weights) // stages * (index + 1) for index in range(stages - 1)] + [len(weights)]

    def size(index: int) -> float:
        return sum(scaled[ends[index - 1] if index else 0 : ends[index]])

    while True:
        largest, top = max((size(index), index) for index in range(stages))
        while True:
            smallest, bottom = min((size(index), index) for index in range(stages))
            if largest <= smallest + 1:
                return [end - (ends[index - 1] if index else 0) for index, end in enumerate(ends)]
            if top < bottom:
                neighbour = bottom - 1
                ends[neighbour] -= 1
            else:
                neighbour = bottom + 1
                ends[bottom] += 1
            if neighbour == top:
                break


BASELINES: dict[str, Splitter] = {"even": even, "parameters": by_parameters, "torchgpipe": by_time}
