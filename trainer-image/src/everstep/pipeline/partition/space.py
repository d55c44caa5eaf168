"""Where a split may be cut: downsets (ideals) of the graph of blocks, and what lies between any two of them.

A split into stages is a chain of downsets: what is done before each cut. All downsets together hold every split
(Tarnawski et al., NeurIPS 2020); the prefixes of one topological order hold those that are contiguous in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from everstep.pipeline.partition.blocks import Blocks, Value

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class Space:
    """Downsets, smallest first (the first is empty, the last holds all), and the pairs where one lies in another.

    An array over pairs is ordered by the larger downset; the blocks between the two are a possible stage.
    """

    def __init__(self, blocks: Blocks, downsets: Iterable[int]) -> None:
        self.blocks = blocks
        self.downsets = sorted(
            set(downsets) | {0, (1 << len(blocks.blocks)) - 1}, key=lambda each: (each.bit_count(), each)
        )
        width = (len(blocks.blocks) + 7) // 8
        raw = b"".join(each.to_bytes(width, "little") for each in self.downsets)
        table = np.frombuffer(raw, np.uint8).reshape(len(self.downsets), width)
        #: Whether a downset holds a block.
        self.holds = np.unpackbits(table, axis=1, count=len(blocks.blocks), bitorder="little").astype(bool)
        sizes = self.holds.sum(axis=1)
        # Counts below 2**24 are exact in float32, whose product is the fastest way to compare all with all.
        numbers = self.holds.astype(np.float32)
        self._inside = (numbers @ numbers.T >= sizes[None, :]) & (sizes[None, :] < sizes[:, None])
        self.upper, self.lower = np.nonzero(self._inside)
        self._kept: dict[Hashable, Floats] = {}

    @property
    def size(self) -> int:
        return len(self.downsets)

    def kept(self, key: Hashable, make: Callable[[], Floats]) -> Floats:
        """What `make` gives, made once for each key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def between(self, of_block: Callable[[int], float]) -> Floats:
        """The sum over the blocks of each pair."""
        each = np.array([of_block(index) for index in range(len(self.blocks.blocks))])
        total: Floats = self.holds @ each
        return total[self.upper] - total[self.lower]

    def incoming(self, weight: Callable[[Value], float], join: np.ufunc = np.add, empty: float = 0.0) -> Floats:
        """The sum, or what `join` makes, of the values that each pair receives from the smaller downset; `empty` where
        there are none."""
        found = np.full((self.size, self.size), empty)
        for value in self.blocks.values:
            cost = weight(value)
            if cost or join is not np.add:
                self._add_used(found, value.consumers, cost, self.holds[:, value.producer], join)
        return self._of_pairs(found)

    def outgoing(self, weight: Callable[[Value], float]) -> Floats:
        """The sum over the values that each pair gives to what is not in the larger downset."""
        found = np.zeros((self.size, self.size))
        for value in self.blocks.values:
            if cost := weight(value):
                here = self.holds[:, value.producer]
                open_ = here & ~self.holds[:, list(value.consumers)].all(axis=1)
                _add(found, open_, ~here, cost)
        return self._of_pairs(found)

    def onward(self, weight: Callable[[Value, int], float], join: np.ufunc, empty: float) -> Floats:
        """What `join` makes of all values that each pair gives and the blocks outside of it that use them."""
        found = np.full((self.size, self.size), empty)
        for value in self.blocks.values:
            here = self.holds[:, value.producer]
            for consumer in value.consumers:
                _add(found, here & ~self.holds[:, consumer], ~here, weight(value, consumer), join)
        return self._of_pairs(found)

    @cached_property
    def shared(self) -> Floats:
        """The bytes of shared parameters that the blocks of each pair use."""
        users: dict[int, list[int]] = {}
        for index, block in enumerate(self.blocks.blocks):
            for number in block.shared:
                users.setdefault(number, []).append(index)
        found = np.zeros((self.size, self.size))
        for number, blocks in users.items():
            self._add_used(found, blocks, self.blocks.shared[number], np.ones(self.size, bool))
        return self._of_pairs(found)

    def _of_pairs(self, found: Floats) -> Floats:
        of_pairs: Floats = found[self._inside]
        return of_pairs

    def _add_used(
        self,
        found: Floats,
        users: Sequence[int],
        cost: float,
        there: NDArray[np.bool_],
        join: np.ufunc = np.add,
    ) -> None:
        """Adds to all pairs where the larger downset holds more of `users` than the smaller one does."""
        count = self.holds[:, list(users)].sum(axis=1)
        for level in np.unique(count[there & (count < len(users))]):
            _add(found, count > level, there & (count == level), cost, join)

    def stages(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """The stage of each block; `cuts`: the downsets after each stage, the last one holds all."""
        stage = np.zeros(len(self.blocks.blocks), np.int64)
        for cut in cuts[:-1]:
            stage += ~self.holds[cut]
        return tuple(int(each) for each in stage)


def _add(
    found: Floats, rows: NDArray[np.bool_], columns: NDArray[np.bool_], cost: float, join: np.ufunc = np.add
) -> None:
    first, second = np.flatnonzero(rows), np.flatnonzero(columns)
    if len(first) and len(second):
        # Of one order all are ranges, which numpy adds to ten times as fast.
        if first[-1] - first[0] < len(first) and second[-1] - second[0] < len(second):
            part = found[first[0] : first[-1] + 1, second[0] : second[-1] + 1]
            join(part, cost, out=part)
        else:
            index = np.ix_(first, second)
            found[index] = join(found[index], cost)


def downsets(blocks: Blocks, limit: int) -> list[int] | None:
    """All downsets, as bits; None if they are more than `limit`."""
    after, before = blocks.after, blocks.before
    needs = [sum(1 << each for each in found) for found in before]
    ready = frozenset(index for index, found in enumerate(before) if not found)
    found = {0: ready}
    row = [0]
    while row:
        grown = []
        for here in row:
            for block in found[here]:
                larger = here | 1 << block
                if larger in found:
                    continue
                new = (each for each in after[block] if needs[each] & ~larger == 0)
                found[larger] = (found[here] - {block}).union(new)
                grown.append(larger)
                if len(found) > limit:
                    return None
        row = grown
    return list(found)


def prefixes(order: Sequence[int]) -> list[int]:
    found = [0]
    for block in order:
        found.append(found[-1] | 1 << block)
    return found


def neighbours(blocks: Blocks, downset: int) -> list[int]:
    """The downsets with one block more or less."""
    count = len(blocks.blocks)
    inside = [bool(downset >> index & 1) for index in range(count)]
    before, after = blocks.before, blocks.after
    return [
        downset ^ 1 << index
        for index in range(count)
        if (
            not any(inside[each] for each in after[index])
            if inside[index]
            else all(inside[each] for each in before[index])
        )
    ]
