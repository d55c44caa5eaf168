"""A part of a graph whose downsets are few enough to search all of them."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.pipeline.partition.blocks import Blocks, BlockValue
from everstep.pipeline.partition.space import Space, list_downsets


class Core:
    """`loose`: the blocks that are left out, those that have most others beside them; what goes through them is still a
    dependency, of a value without bytes and without gradient."""

    def __init__(self, blocks: Blocks, most: int, rest: int) -> None:
        """No more than `most` downsets without loose blocks, or `rest` with them."""
        self.whole, self.loose = blocks, set[int]()
        found = list_downsets(blocks, most)
        beside = _count_incomparable(blocks) if found is None else []
        while found is None:
            top = max(count for index, count in enumerate(beside) if index not in self.loose)
            self.loose |= {index for index, count in enumerate(beside) if count >= 0.9 * top}
            found = list_downsets(self._kept_blocks(), rest)
        self.downsets, self.blocks = found, self._kept_blocks()

    @property
    def kept(self) -> list[int]:
        return [index for index in range(len(self.whole.blocks)) if index not in self.loose]

    def _kept_blocks(self) -> Blocks:
        if not self.loose:
            return self.whole
        number = {index: place for place, index in enumerate(self.kept)}
        values = []
        for value in self.whole.values:
            users = tuple(number[each] for each in value.consumers if each in number)
            if value.producer in number and users:
                values.append(BlockValue(number[value.producer], users, value.size, value.gradient))
        through: dict[int, set[int]] = {}  # of each loose block, the kept ones that it comes from
        for index, before in enumerate(self.whole.before):
            found = set[int]().union(*(through[each] for each in before & self.loose))
            if index in self.loose:
                through[index] = found | (before - self.loose)
            else:
                values += [BlockValue(number[each], (number[index],), 0, False) for each in sorted(found - before)]
        return Blocks(tuple(self.whole.blocks[index] for index in self.kept), tuple(values), self.whole.shared)

    def stages(self, space: Space, cuts: Sequence[int]) -> tuple[int, ...] | None:
        """Return the stage of each block; None if a stage is empty.

        A loose block is where the last of the blocks that it uses is.
        """
        stage = dict(zip(self.kept, space.stages(cuts), strict=True))
        for index, before in enumerate(self.whole.before):
            if index in self.loose:
                stage[index] = max((stage[each] for each in before), default=0)
        found = tuple(stage[index] for index in range(len(self.whole.blocks)))
        return found if len(set(found)) == len(cuts) else None


def _count_incomparable(blocks: Blocks) -> list[int]:
    """Return for each block how many others are neither before nor after it."""
    count = len(blocks.blocks)
    above, below = [0] * count, [0] * count
    for index, before in enumerate(blocks.before):
        for each in before:
            above[index] |= above[each] | 1 << each
    for index in reversed(range(count)):
        for each in blocks.after[index]:
            below[index] |= below[each] | 1 << each
    return [count - 1 - first.bit_count() - last.bit_count() for first, last in zip(above, below, strict=True)]
