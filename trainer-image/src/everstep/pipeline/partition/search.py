"""The exact dynamic programme over chains of downsets.

For a cap on the dearest stage and a cap on memory, the least sum of stage times is a shortest path over the downsets,
one step per stage; the caps are found by branch and bound over their possible values, so the result is the optimum of
sum + (m - 1) · max (and of memory, if it has weight) within the space, or within the stated bound of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.pipeline.partition.levels import Found, find_least
from everstep.pipeline.partition.problem import PartitionProblem
from everstep.pipeline.partition.space import Floats, Indices, Space

Cuts = tuple[int, ...]


@dataclass(frozen=True)
class SearchResult:
    """Splits found, best first, as cuts; `bound`: what no split of the space is below, as objective."""

    cuts: tuple[Cuts, ...]
    bound: float


class Search:
    """Searches one space for one problem."""

    def __init__(self, space: Space, problem: PartitionProblem) -> None:
        self.space = space
        self.problem = problem

    def run(self, *, tolerance: float, most: int) -> SearchResult:
        """The best splits; `tolerance`: how far above the bound is near enough, `most`: of questions of each level.

        No cuts if no split of the space fits the devices.
        """
        problem, every = self.problem, self._arcs(None, inf)
        if not problem.memory_weight:
            seconds = self._fastest(every, tolerance=tolerance, most=most)
            return SearchResult(seconds.solution, seconds.bound) if seconds else SearchResult((), inf)
        start = every.bottleneck(self._bytes)
        if start is None:
            return SearchResult((), inf)
        levels = self._levels(self._bytes, start, inf)
        weight = problem.memory_weight

        def ask(cap: float) -> Found[tuple[Cuts, ...]] | None:
            seconds = self._fastest(self._arcs(self._bytes, cap), tolerance=tolerance / 2, most=most)
            if seconds is None:
                return None
            factor = (1 - weight) / problem.time_scale
            return Found(
                seconds.cost * factor,
                seconds.bound * factor,
                self._peak(seconds.solution[0], self._bytes),
                seconds.solution,
            )

        answer = find_least(levels, ask, weight / problem.memory_scale, tolerance=tolerance, most=most)
        return SearchResult(tuple(dict.fromkeys(cuts for _, found in answer.found for cuts in found)), answer.bound)

    def every(self, most: int) -> list[Cuts]:
        """All splits whose stages fit their devices; none if those of any stages are more than `most`."""
        arcs = self._arcs(None, inf)
        ways: np.ndarray[Any, Any] = np.zeros(self.space.size)
        ways[0] = 1.0
        for _ in range(self.problem.stages):
            ways = np.bincount(arcs.upper, ways[arcs.lower], self.space.size)
        return arcs.ways() if ways[-1] <= most else []

    def _fastest(self, arcs: _Arcs, *, tolerance: float, most: int) -> Found[tuple[Cuts, ...]] | None:
        """Least sum + (m - 1) · max; the solution is a list of splits, best first."""
        low = arcs.bottleneck(self._times)
        if low is None:
            return None
        # Of ranks with several stages, as if these were alike.
        repeat = (self.problem.microbatches - 1) * self.problem.stages // self.problem.ranks
        fast = arcs.shortest(self._times)
        narrow = arcs.below(self._times, low).shortest(self._times)
        assert fast is not None
        assert narrow is not None
        best = min(cost + repeat * self._peak(cuts, self._times) for cost, cuts in (fast, narrow))
        high = (best - fast[0]) / repeat * (1 + 1e-12) if repeat else inf
        inner = arcs.below(self._times, max(high, low))

        def ask(cap: float) -> Found[Cuts] | None:
            path = inner.below(self._times, cap).shortest(self._times)
            return path and Found(path[0], path[0], self._peak(path[1], self._times), path[1])

        levels = self._levels(self._times, low, max(high, low), inner) if repeat else [inf]
        answer = find_least(levels, ask, repeat, tolerance=tolerance, most=most)
        solutions = [cuts for _, cuts in answer.found]
        top = self._peak(solutions[0], self._times)
        solutions += [narrow[1], *inner.below(self._times, top).through(self._times, 4 * self.problem.stages)]
        return Found(answer.found[0][0], answer.bound, top, tuple(dict.fromkeys(solutions)))

    def _arcs(self, cost: Callable[[int], Floats] | None, cap: float) -> _Arcs:
        """Arcs whose stage fits its device, and the cap."""
        keep: list[NDArray[np.bool_]] | None = None
        if cost is not None or any(limit is not None for limit in self.problem.memory):
            limits = [min(cap, inf if most is None else most) for most in self.problem.memory]
            keep = [self._bytes(stage) <= limit for stage, limit in enumerate(limits)]
        return _Arcs(self.space, self.problem.stages, keep)

    def _levels(self, cost: Callable[[int], Floats], low: float, high: float, arcs: _Arcs | None = None) -> list[float]:
        """All values of a cost from `low` to `high`, ascending."""
        found = []
        for key in {id(cost(stage)): stage for stage in range(self.problem.stages)}.values():
            values = cost(key) if arcs is None else cost(key)[arcs.index]
            found.append(values[(values >= low) & (values <= high)])
        levels: list[float] = np.unique(np.concatenate(found)).tolist()
        return levels

    def _peak(self, cuts: Cuts, cost: Callable[[int], Floats]) -> float:
        lower = 0
        peak = 0.0
        for stage, upper in enumerate(cuts):
            peak = max(peak, float(cost(stage)[self._pair(lower, upper)]))
            lower = upper
        return peak

    def _pair(self, lower: int, upper: int) -> int:
        start = int(np.searchsorted(self.space.upper, upper))
        stop = int(np.searchsorted(self.space.upper, upper, side="right"))
        return start + int(np.searchsorted(self.space.lower[start:stop], lower))

    def _times(self, stage: int) -> Floats:
        """Seconds of `stage` for each pair; stages of the same kind share one array."""
        problem, space = self.problem, self.space
        # A first stage receives nothing and a last one gives nothing, whatever the hop: they use the others' arrays.
        into = problem.incoming(max(stage, min(1, problem.stages - 1)))
        out = problem.outgoing(min(stage, max(0, problem.stages - 2)))
        speed = problem.speed[stage]

        def make() -> Floats:
            work = space.kept(("work",), lambda: space.between(lambda each: space.blocks.blocks[each].work))
            came = space.kept(("in", into), lambda: space.incoming(into.seconds))
            gone = space.kept(("out", out), lambda: space.outgoing(out.seconds))
            return work / speed + came + gone

        return space.kept(("times", speed, into, out), make)

    def _bytes(self, stage: int) -> Floats:
        problem, space = self.problem, self.space
        kept = problem.in_flight[stage]

        def make() -> Floats:
            blocks = space.blocks.blocks
            parameters = space.kept(("parameters",), lambda: space.between(lambda each: blocks[each].parameters))
            activation = space.kept(("activation",), lambda: space.between(lambda each: blocks[each].activation))
            return (parameters + space.shared) * (1 + problem.optimizer_factor) + activation * kept

        return space.kept(("bytes", kept), make)


class _Arcs:
    """Pairs that may be stages: `index` into those of the space, for each stage which of them (None: all)."""

    def __init__(
        self,
        space: Space,
        stages: int,
        keep: Sequence[NDArray[np.bool_]] | None,
        index: Indices | None = None,
    ) -> None:
        self.space = space
        self.stages = stages
        if index is None:
            some = None if keep is None else np.logical_or.reduce(list({id(each): each for each in keep}.values()))
            index = np.arange(len(space.upper)) if some is None else np.flatnonzero(some)
            keep = None if keep is None else [each[index] for each in keep]
        self.index = index
        self._keep = keep
        self.lower, self.upper = space.lower[index], space.upper[index]

    @cached_property
    def _groups(self) -> tuple[Indices, Indices]:
        """The downsets that arcs lead to, and where their arcs begin."""
        return np.unique(self.upper, return_index=True)

    def below(self, cost: Callable[[int], Floats], cap: float) -> _Arcs:
        """Return the arcs whose cost is no more than the cap."""
        keep: list[NDArray[np.bool_]] = []
        for stage in range(self.stages):
            fits = cost(stage)[self.index] <= cap
            keep.append(fits if self._keep is None else fits & self._keep[stage])
        some = np.logical_or.reduce(keep)
        return _Arcs(self.space, self.stages, [each[some] for each in keep], self.index[some])

    def shortest(self, cost: Callable[[int], Floats]) -> tuple[float, Cuts] | None:
        """The least sum of costs, and its cuts; None if there is no way."""
        tables = self._forward(cost, np.add)
        if not np.isfinite(tables[-1][-1]):
            return None
        return float(tables[-1][-1]), self._back(tables, cost, self.stages, self.space.size - 1)

    def bottleneck(self, cost: Callable[[int], Floats]) -> float | None:
        """The least maximum of costs; None if there is no way."""
        value = float(self._forward(cost, np.maximum)[-1][-1])
        return value if value < inf else None

    def ways(self) -> list[Cuts]:
        """All ways of as many arcs as there are stages."""
        found: list[Cuts] = []
        # Of each stage, the arcs from whose end the others lead to the last downset: most ways of many stages do not.
        leading: list[NDArray[np.bool_]] = []
        ends = np.arange(self.space.size) == self.space.size - 1
        for stage in reversed(range(self.stages)):
            leads = ends[self.upper] if self._keep is None else ends[self.upper] & self._keep[stage]
            leading.append(leads)
            ends = np.zeros(self.space.size, dtype=np.bool_)
            ends[self.lower[leads]] = True
        leading.reverse()

        def walk(cuts: Cuts) -> None:
            cut = cuts[-1] if cuts else 0
            if len(cuts) == self.stages:
                found.append(cuts)
                return
            arcs = np.flatnonzero((self.lower == cut) & leading[len(cuts)])
            for upper in self.upper[arcs].tolist():
                walk((*cuts, upper))

        walk(())
        return found

    def through(self, cost: Callable[[int], Floats], count: int) -> list[Cuts]:
        """Find for each cut the best split that has it, and return the best `count` of these."""
        forward = self._forward(cost, np.add)
        backward = np.full(self.space.size, inf)
        backward[-1] = 0.0
        rows = [backward]
        for stage in reversed(range(1, self.stages)):
            row = np.full(self.space.size, inf)
            np.minimum.at(row, self.lower, backward[self.upper] + self._of(cost, stage))
            rows.append(backward := row)
        rows.reverse()  # rows[i]: from a cut after stage i to the end
        found: list[tuple[float, int, int]] = []
        for stage, row in enumerate(rows[:-1]):
            total = forward[stage + 1] + row
            near = np.argsort(total, kind="stable")[:count]
            found += [(float(total[cut]), stage, int(cut)) for cut in near if total[cut] < inf]
        cuts: dict[Cuts, None] = {}
        for _, stage, cut in sorted(found)[: 2 * count]:
            head = self._back(forward, cost, stage + 1, cut)
            cuts[head + self._onward(rows, cost, stage, cut)] = None
        return list(cuts)[:count]

    def _of(self, cost: Callable[[int], Floats], stage: int, at: Indices | slice = slice(None)) -> Floats:
        """Costs as one stage of the arcs `at`; infinite where they cannot be it."""
        each = cost(stage)[self.index[at]]
        return each if self._keep is None else np.where(self._keep[stage][at], each, inf)

    def _forward(self, cost: Callable[[int], Floats], join: np.ufunc) -> list[Floats]:
        """tables[i][d]: the least cost of downset d in i stages."""
        table = np.full(self.space.size, inf)
        table[0] = 0.0
        tables = [table]
        reached, starts = self._groups
        for stage in range(self.stages):
            row = np.full(self.space.size, inf)
            if len(starts):
                row[reached] = np.minimum.reduceat(join(table[self.lower], self._of(cost, stage)), starts)
            tables.append(table := row)
        return tables

    def _back(self, tables: list[Floats], cost: Callable[[int], Floats], stages: int, cut: int) -> Cuts:
        """The cuts of the best way to `cut` in `stages` stages."""
        cuts = [cut]
        for stage in reversed(range(1, stages)):
            start, stop = (int(np.searchsorted(self.upper, cuts[-1], side=side)) for side in ("left", "right"))
            each = self._of(cost, stage, slice(start, stop))
            cuts.append(int(self.lower[start + int(np.argmin(tables[stage][self.lower[start:stop]] + each))]))
        return tuple(reversed(cuts))

    def _onward(self, rows: list[Floats], cost: Callable[[int], Floats], stage: int, cut: int) -> Cuts:
        cuts: list[int] = []
        for following in range(stage + 1, self.stages):
            arcs = np.flatnonzero(self.lower == cut)
            each = self._of(cost, following, arcs)
            cut = int(self.upper[arcs[int(np.argmin(rows[following][self.upper[arcs]] + each))]])
            cuts.append(cut)
        return tuple(cuts)
