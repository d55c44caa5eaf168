"""What the simulator says of every split at least, and the splits that come nearest to it.

A step is not shorter than what each of its stages says (`floor`): the least of the largest over all splits is a
bottleneck path over the downsets. Where links are slow, the splits near it are not those that the search by formula
finds. If the splits below a level are few, they may all be simulated: the bound is then that of all others.
Blocks that make the downsets too many are taken out of the graph, and their work is given to whom it hurts least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.pipeline.partition.certificate import memory
from everstep.pipeline.partition.core import Core
from everstep.pipeline.partition.floor import Floor
from everstep.pipeline.partition.levels import Found, least
from everstep.pipeline.partition.problem import Problem
from everstep.pipeline.partition.space import Floats, Space

LOOSENED = 1000  # downsets that are searched when not all can be: the bound is loose then, whatever the time it takes
TOLERANCE = 1e-4  # of a bound that is found by halving
Cuts = tuple[int, ...]
Split = tuple[int, ...]  # the stage of each block


class Limit:
    """`bound`: what the objective of every split is at least, as simulated; `split`: the one of which this was said, if
    it is one. `known`: the objective of a split as simulated, or infinity, which the bound is no more than.

    `most`: downsets that are searched. With several stages on a rank, the bound is that of all work divided freely.
    """

    split: Split | None = None

    def __init__(self, problem: Problem, known: float, most: int) -> None:
        self._paths: _Paths | None = None
        if problem.ranks < problem.stages:
            self.bound = min(known, _freely(problem))
            return
        core = Core(problem.blocks, most, min(most, LOOSENED))
        self._paths = paths = _Paths(core, problem, inf if problem.memory_weight else known)
        self.bound, cuts = _both(problem, paths) if problem.memory_weight else paths.fastest(inf)
        self.bound = min(self.bound, known)
        if cuts:
            self.split = core.stages(paths.space, cuts)

    def near(self, known: float, most: int) -> tuple[list[Split], float]:
        """All splits whose bounds are below some level, at most `most`, and that level, which is no more than `known`:
        what is found by simulating these is the best there is, or no split is better than the level."""
        paths = self._paths
        if paths is None or paths.loose or paths.problem.memory_weight or known == inf:
            return [], self.bound
        found, level = paths.near(known, most)
        return [paths.space.stages(cuts) for cuts in found], max(level, self.bound)


def _freely(problem: Problem) -> float:
    blocks = problem.blocks.blocks
    work = [block.work for block in blocks]
    speeds = dict(zip(problem.placement, problem.speed, strict=True)).values()
    seconds = problem.microbatches * max(sum(work) / sum(speeds), max(work) / max(speeds))
    parameters = sum(block.parameters for block in blocks) * (1 + problem.words)
    return problem.objective(seconds, parameters / problem.ranks)


def _both(problem: Problem, paths: _Paths) -> tuple[float, Cuts]:
    """Of time and memory: by branch and bound over the bytes that a stage may have."""
    weight = problem.memory_weight
    factor = (1 - weight) / problem.time_scale

    def ask(cap: float) -> Found[Cuts] | None:
        seconds, cuts = paths.fastest(cap)
        return Found(seconds * factor, seconds * factor, paths.peak(cuts), cuts) if cuts else None

    answer = least(paths.sizes, ask, weight / problem.memory_scale, tolerance=1e-3, most=60)
    whole = problem.objective(0.0, memory(problem))
    return max(answer.bound, whole), answer.found[0][1] if answer.found else ()


class _Paths:
    """Stages of one problem as arcs between downsets, without those whose work alone takes longer than `known`."""

    def __init__(self, core: Core, problem: Problem, known: float) -> None:
        self.problem = replace(problem, blocks=core.blocks)
        self.space = Space(core.blocks, core.downsets)
        self.loose = [problem.blocks.blocks[index].work for index in sorted(core.loose)]
        self._known = known
        work = self.space.between(lambda each: core.blocks.blocks[each].work)
        index = np.flatnonzero(work * problem.microbatches <= known * max(problem.speed) * (1 + 1e-9))
        self._lower, self._upper = self.space.lower[index], self.space.upper[index]
        self._floor = Floor(self.problem, self.space, index)

    def fastest(self, cap: float) -> tuple[float, Cuts]:
        """The least seconds when no stage has more than `cap` bytes, and the cuts; none if there are none."""
        costs = [np.where(size <= cap, cost, inf) for size, cost in zip(self._bytes, self._seconds, strict=True)]
        seconds, cuts = self._path(costs, np.maximum)
        return self._with_loose(costs, seconds, cuts) if cuts and self.loose else (seconds, cuts)

    def _with_loose(self, costs: Sequence[Floats], seconds: float, cuts: Cuts) -> tuple[float, Cuts]:
        """The least step in which stages have time left for the loose blocks, too."""
        m, speeds = self.problem.microbatches, self.problem.speed
        extra = m * sum(self.loose)
        plain = [self._floor.plain(stage) * speed for stage, speed in enumerate(speeds)]

        def fits(step: float) -> Cuts:
            allowed = [np.where(cost <= step, used, inf) for cost, used in zip(costs, plain, strict=True)]
            used, found = self._path(allowed, np.add)
            return found if used + extra <= step * sum(speeds) else ()

        low = max(seconds, m * max(self.loose) / max(speeds))
        if found := fits(low):
            return low, found
        high = min(self._known, 2 * low + extra / min(speeds))
        while high - low > TOLERANCE * low:
            middle = (low + high) / 2
            if found := fits(middle):
                high, cuts = middle, found
            else:
                low = middle
        return low, cuts

    def near(self, known: float, most: int) -> tuple[list[Cuts], float]:
        """The cuts of all splits up to the highest level of which they are no more than `most`, and the next level."""
        levels = np.unique(np.concatenate([cost[cost < known] for cost in self._seconds]))
        low, high = -1, len(levels) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._ways(levels[middle]) <= most else (low, middle - 1)
        beyond = float(levels[low + 1]) if low + 1 < len(levels) else known
        if low < 0:
            return [], beyond
        arcs = [cost <= levels[low] for cost in self._seconds]
        ends = [np.arange(self.space.size) == self.space.size - 1]  # from where there is a way to the end
        for each in reversed(arcs):
            reached = np.bincount(self._lower[each & ends[0][self._upper]], minlength=self.space.size)
            ends.insert(0, reached > 0)
        found: list[Cuts] = [()]
        for each, end in zip(arcs, ends[1:], strict=True):
            good = each & end[self._upper]
            found = [
                (*cuts, int(cut))
                for cuts in found
                for cut in self._upper[good & (self._lower == (cuts[-1] if cuts else 0))]
            ]
        return found, beyond

    def _ways(self, level: float) -> float:
        """How many splits have no stage above a level."""
        ways: NDArray[Any] = np.zeros(self.space.size)
        ways[0] = 1.0
        for cost in self._seconds:
            ways = np.bincount(self._upper, ways[self._lower] * (cost <= level), self.space.size)
        return float(ways[-1])

    def peak(self, cuts: Cuts) -> float:
        """Bytes of the fullest stage."""
        stages = zip(self._bytes, (0, *cuts), cuts, strict=False)
        return max(
            (float(size[(self._lower == low) & (self._upper == up)][0]) for size, low, up in stages if low != up),
            default=0.0,
        )

    @cached_property
    def sizes(self) -> list[float]:
        """All bytes that a stage may have, ascending."""
        found: list[float] = np.unique(np.concatenate([np.zeros(1), *self._bytes])).tolist()
        return found

    @cached_property
    def _bytes(self) -> list[Floats]:
        return [self._floor.bytes(stage) for stage in range(self.problem.stages)]

    @cached_property
    def _seconds(self) -> list[Floats]:
        """What each arc says as each stage; infinite if it does not fit the device."""
        return [
            np.where(self._bytes[stage] <= (inf if most is None else most), self._floor.seconds(stage), inf)
            for stage, most in enumerate(self.problem.memory)
        ]

    def _path(self, costs: Sequence[Floats], join: np.ufunc) -> tuple[float, Cuts]:
        """The least of what `join` makes of one arc for each stage, and the cuts; infinity and none without a way."""
        tables = [np.full(self.space.size, inf)]
        tables[0][0] = 0.0
        reached, starts = np.unique(self._upper, return_index=True)
        for cost in costs:
            row = np.full(self.space.size, inf)
            if len(starts):
                row[reached] = np.minimum.reduceat(join(tables[-1][self._lower], cost), starts)
            tables.append(np.minimum(row, tables[-1]) if self.loose else row)  # a stage may be of loose blocks alone
        if not np.isfinite(tables[-1][-1]):
            return inf, ()
        cuts = [self.space.size - 1]
        for stage in reversed(range(1, len(costs))):
            start, stop = (int(np.searchsorted(self._upper, cuts[-1], side=side)) for side in ("left", "right"))
            each = join(tables[stage][self._lower[start:stop]], costs[stage][start:stop])
            stays = self.loose and tables[stage][cuts[-1]] <= each.min(initial=inf)
            cuts.append(cuts[-1] if stays else int(self._lower[start + int(np.argmin(each))]))
        return float(tables[-1][-1]), tuple(reversed(cuts))
