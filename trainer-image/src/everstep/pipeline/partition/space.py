"""List the places where a split may be cut: downsets (ideals) of the graph of blocks, and what lies between any two.

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

from everstep.pipeline.partition.blocks import Blocks, BlockValue

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]
Place = tuple[slice, slice] | tuple[NDArray[Any], NDArray[Any]]
P = ParamSpec("P")

TILE = 256  # larger downsets whose pairs are found at once: with neighbours in size lie about the same smaller ones


@dataclass(frozen=True)
class Joined(Generic[P]):
    """A quantity of all values of a pair: `join` combines what `weight` returns for each; `empty` stands where there is
    none."""

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
        self._holders = np.ascontiguousarray(self.holds.T)
        self._inside = self._find_pairs(most)
        self.upper, self.lower = np.nonzero(self._inside)
        self._kept: dict[Hashable, Floats] = {}

    def _find_pairs(self, most: float) -> Mask:
        sizes = self.holds.sum(axis=1)
        work = self.total(np.array([block.work for block in self.blocks.blocks]))
        # Counts below 2**24 are exact in float32, whose product is the fastest way to compare all with all.
        numbers = self.holds.astype(np.float32)
        found = np.zeros((self.size, self.size), bool)
        for start in range(0, self.size, TILE):
            rows = slice(start, start + TILE)
            # A little wider than asked for, since other sums round otherwise; below, each pair is compared itself.
            near = np.flatnonzero(work[: rows.stop] >= work[rows].min() - most - 1e-9 * work[-1])
            columns = slice(near[0], near[-1] + 1)
            common = numbers[rows] @ numbers[columns].T
            inside = (common >= sizes[None, columns]) & (sizes[None, columns] < sizes[rows, None])
            found[rows, columns] = inside & (work[rows, None] - work[None, columns] <= most)
        return found

    @cached_property
    def _tiles(self) -> list[tuple[slice, slice]]:
        """Rows and columns of the table of pairs beside which there are none, in the order of the pairs."""
        found = []
        for start in range(0, self.size, TILE):
            rows = slice(start, start + TILE)
            near = np.flatnonzero(self._inside[rows].any(axis=0))
            if len(near):
                found.append((rows, slice(near[0], near[-1] + 1)))
        return found

    @property
    def size(self) -> int:
        return len(self.downsets)

    def kept(self, key: Hashable, make: Callable[[], Floats]) -> Floats:
        """Return the result of `make`, which is called once for each key."""
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

    def incoming(self, weight: Callable[[BlockValue], float]) -> Floats:
        """The sum over the values that each pair receives from the smaller downset."""
        return self.received([Joined(weight)])[0]

    def received(self, wanted: Sequence[Joined[[BlockValue]]]) -> list[Floats]:
        """Return each wanted quantity of the values that each pair receives from the smaller downset."""
        uses = [
            (value, upper, lower)
            for value in self.blocks.values
            if any(each.weight(value) for each in wanted)
            for upper, lower in self._used(value.consumers, self._holders[value.producer])
        ]
        found = []
        for each in wanted:
            if each.join is np.add:
                found.append(self._sums([(each.weight(value), upper, lower) for value, upper, lower in uses]))
                continue
            table = np.full((self.size, self.size), each.empty)
            for value, upper, lower in uses:
                if (place := _find_true_cell(upper, lower)) is not None:
                    each.add(table, place, each.weight(value))
            found.append(self._of_pairs(table))
        return found

    def outgoing(self, weight: Callable[[BlockValue], float]) -> Floats:
        """The sum over the values that each pair gives to what is not in the larger downset."""
        terms = []
        for value in self.blocks.values:
            if cost := weight(value):
                here = self._holders[value.producer]
                terms.append((cost, here & ~self._holders[list(value.consumers)].all(axis=0), ~here))
        return self._sums(terms)

    def _sums(self, terms: Sequence[tuple[float, Mask, Mask]]) -> Floats:
        """The sum over the terms of each pair whose larger downset is in the first mask, its smaller one in the second.

        A product of matrices for each tile: of many orders, numpy takes a hundred times as long to add one by one.
        """
        terms = [term for term in terms if term[0]]
        if not terms:
            return np.zeros(len(self.upper))
        costs = np.array([cost for cost, _, _ in terms])
        uppers, lowers = np.array([upper for _, upper, _ in terms]), np.array([lower for _, _, lower in terms])
        found = []
        for rows, columns in self._tiles:
            some = uppers[:, rows].any(axis=1) & lowers[:, columns].any(axis=1)
            given = lowers[some, columns] * costs[some, None]
            total = uppers[some, rows].T.astype(np.float64) @ given
            found.append(total[self._inside[rows, columns]])
        return np.concatenate(found)

    def onward(self, wanted: Sequence[Joined[[BlockValue, int]]]) -> list[Floats]:
        """Return each wanted quantity of the values that each pair gives, and the blocks outside of it that use
        them."""
        found = [np.full((self.size, self.size), each.empty) for each in wanted]
        for value in self.blocks.values:
            here = self._holders[value.producer]
            for consumer in value.consumers:
                if (place := _find_true_cell(here & ~self._holders[consumer], ~here)) is not None:
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
            for upper, lower in self._used(blocks, np.ones(self.size, bool)):
                if (place := _find_true_cell(upper, lower)) is not None:
                    found[place] += self.blocks.shared[number]
        return self._of_pairs(found)

    def _of_pairs(self, found: Floats) -> Floats:
        of_pairs: Floats = found[self._inside]
        return of_pairs

    def _used(self, users: Sequence[int], there: Mask) -> Iterator[tuple[Mask, Mask]]:
        """All pairs where the larger downset holds more of `users` than the smaller one does, which is one of `there`;
        each pair once, as those that may be the larger one, and those that may be the smaller one."""
        count = self._holders[list(users)].sum(axis=0)
        for level in np.unique(count[there & (count < len(users))]):
            yield count > level, there & (count == level)

    def stages(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """The stage of each block; `cuts`: the downsets after each stage, the last one holds all."""
        stage = np.zeros(len(self.blocks.blocks), np.int64)
        for cut in cuts[:-1]:
            stage += ~self.holds[cut]
        return tuple(int(each) for each in stage)


def _find_true_cell(rows: Mask, columns: Mask) -> Place | None:
    """Return the index of the cells of a table where both the row and the column are true; None if there are none."""
    first, second = np.flatnonzero(rows), np.flatnonzero(columns)
    if not len(first) or not len(second):
        return None
    # Of one order all are ranges, in which numpy computes ten times as fast.
    if first[-1] - first[0] < len(first) and second[-1] - second[0] < len(second):
        return slice(first[0], first[-1] + 1), slice(second[0], second[-1] + 1)
    rows_, columns_ = np.ix_(first, second)
    return rows_, columns_


def list_downsets(blocks: Blocks, limit: int) -> list[int] | None:
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


def list_prefixes(order: Sequence[int]) -> list[int]:
    found = [0]
    for block in order:
        found.append(found[-1] | 1 << block)
    return found


def list_neighbours(blocks: Blocks, downset: int) -> list[int]:
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
