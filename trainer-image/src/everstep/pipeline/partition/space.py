"""Where a split may be cut: downsets (ideals) of the graph of blocks, and what lies between any two of them.

A split into stages is a chain of downsets: what is done before each cut. All downsets together hold every split
(Tarnawski et al., NeurIPS 2020); the prefixes of one topological order hold those that are contiguous in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, Generic, ParamSpec

import numpy as np
from numpy.typing import NDArray

from everstep.pipeline.partition.blocks import Blocks, Value

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Place = tuple[slice, slice] | tuple[NDArray[Any], NDArray[Any]]
P = ParamSpec("P")


@dataclass(frozen=True)
class Joined(Generic[P]):
    """What `join` makes of all that `weight` gives; `empty` where there is nothing."""

    weight: Callable[P, float]
    join: np.ufunc = np.add
    empty: float = 0.0

    def add(self, table: Floats, place: Place, cost: float) -> None:
        if cost or self.join is not np.add:
            table[place] = self.join(table[place], cost)


class Space:
    """Downsets, smallest first (the first is empty, the last holds all), and the pairs where one lies in another.

    An array over pairs is ordered by the larger downset; the blocks between the two are a possible stage. Pairs with
    more than `most` seconds of work between them are left out.
    """

    def __init__(self, blocks: Blocks, downsets: Iterable[int], most: float = inf) -> None:
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
        if most < inf:
            work = self.total(np.array([block.work for block in blocks.blocks]))
            self._inside &= work[:, None] - work[None, :] <= most
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
        total = self.total(each)
        return total[self.upper] - total[self.lower]

    def total(self, of_block: Floats) -> Floats:
        """The sum over the blocks of each downset."""
        found: Floats = self._numbers @ of_block
        return found

    @cached_property
    def _numbers(self) -> Floats:
        return self.holds.astype(np.float64)

    def incoming(self, weight: Callable[[Value], float]) -> Floats:
        """The sum over the values that each pair receives from the smaller downset."""
        return self.received([Joined(weight)])[0]

    def received(self, wanted: Sequence[Joined[[Value]]]) -> list[Floats]:
        """What is wanted, of the values that each pair receives from the smaller downset."""
        found = [np.full((self.size, self.size), each.empty) for each in wanted]
        for value in self.blocks.values:
            costs = [each.weight(value) for each in wanted]
            if any(costs):
                for place in self._used(value.consumers, self.holds[:, value.producer]):
                    for each, cost, table in zip(wanted, costs, found, strict=True):
                        each.add(table, place, cost)
        return [self._of_pairs(each) for each in found]

    def outgoing(self, weight: Callable[[Value], float]) -> Floats:
        """The sum over the values that each pair gives to what is not in the larger downset."""
        found = np.zeros((self.size, self.size))
        for value in self.blocks.values:
            if cost := weight(value):
                here = self.holds[:, value.producer]
                open_ = here & ~self.holds[:, list(value.consumers)].all(axis=1)
                if (place := _place(open_, ~here)) is not None:
                    found[place] += cost
        return self._of_pairs(found)

    def onward(self, wanted: Sequence[Joined[[Value, int]]]) -> list[Floats]:
        """What is wanted, of the values that each pair gives and the blocks outside of it that use them."""
        found = [np.full((self.size, self.size), each.empty) for each in wanted]
        for value in self.blocks.values:
            here = self.holds[:, value.producer]
            for consumer in value.consumers:
                if (place := _place(here & ~self.holds[:, consumer], ~here)) is not None:
                    for each, table in zip(wanted, found, strict=True):
                        each.add(table, place, each.weight(value, consumer))
        return [self._of_pairs(each) for each in found]

    @cached_property
    def shared(self) -> Floats:
        """The bytes of shared parameters that the blocks of each pair use."""
        users: dict[int, list[int]] = {}
        for index, block in enumerate(self.blocks.blocks):
            for number in block.shared:
                users.setdefault(number, []).append(index)
        found = np.zeros((self.size, self.size))
        for number, blocks in users.items():
            for place in self._used(blocks, np.ones(self.size, bool)):
                found[place] += self.blocks.shared[number]
        return self._of_pairs(found)

    def _of_pairs(self, found: Floats) -> Floats:
        of_pairs: Floats = found[self._inside]
        return of_pairs

    def _used(self, users: Sequence[int], there: NDArray[np.bool_]) -> Iterator[Place]:
        """All pairs where the larger downset holds more of `users` than the smaller one does, which is one of `there`;
        each pair once."""
        count = self.holds[:, list(users)].sum(axis=1)
        for level in np.unique(count[there & (count < len(users))]):
            if (place := _place(count > level, there & (count == level))) is not None:
                yield place

    def stages(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """The stage of each block; `cuts`: the downsets after each stage, the last one holds all."""
        stage = np.zeros(len(self.blocks.blocks), np.int64)
        for cut in cuts[:-1]:
            stage += ~self.holds[cut]
        return tuple(int(each) for each in stage)


def _place(rows: NDArray[np.bool_], columns: NDArray[np.bool_]) -> Place | None:
    """Where both are true in a table."""
    first, second = np.flatnonzero(rows), np.flatnonzero(columns)
    if not len(first) or not len(second):
        return None
    # Of one order all are ranges, in which numpy computes ten times as fast.
    if first[-1] - first[0] < len(first) and second[-1] - second[0] < len(second):
        return slice(first[0], first[-1] + 1), slice(second[0], second[-1] + 1)
    rows_, columns_ = np.ix_(first, second)
    return rows_, columns_


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
