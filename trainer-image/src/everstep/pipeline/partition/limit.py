"""Bound from below what the simulator says of every split, and find the splits that come nearest to the bound.

A step is not shorter than what each of its stages says (`floor`): the least of the largest over all splits is a
bottleneck path over the downsets. Where links are slow, the splits near it are not those that the search by formula
finds. If the splits below a level are few, they may all be simulated: the bound is then that of all others. Blocks that
make the downsets too many are taken out of the graph, and their work is given to the stage that it hurts least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.pipeline.partition.certificate import bound_memory
from everstep.pipeline.partition.core import Core
from everstep.pipeline.partition.floor import StageBound
from everstep.pipeline.partition.levels import Found, find_least
from everstep.pipeline.partition.problem import PartitionProblem
from everstep.pipeline.partition.space import Floats, Indices, Space

LOOSENED = 1000  # downsets that are searched when not all can be: the bound is loose then, whatever the time it takes
TOLERANCE = 1e-4  # of a bound that is found by halving
Cuts = tuple[int, ...]
Split = tuple[int, ...]  # the stage of each block


class LowerBound:
    """`bound`: what the objective of every split is at least, as simulated; `split`: the one of which this was said, if
    it is one. `known`: the objective of a split as simulated, or infinity, which the bound is no more than.

    `most`: downsets that are searched. With several stages on a rank, the bound is that of all work divided freely.
    """

    split: Split | None = None

    def __init__(self, problem: PartitionProblem, known: float, most: int) -> None:
        self._paths: _Paths | None = None
        if problem.ranks < problem.stages:
            self.bound = min(known, _bound_freely(problem))
            return
        core = Core(problem.blocks, most, min(most, LOOSENED))
        self._paths = paths = _Paths(core, problem, inf if problem.memory_weight else known)
        self.bound, cuts = _bound_time_and_memory(problem, paths) if problem.memory_weight else paths.fastest(inf)
        self.bound = min(self.bound, known)
        if cuts:
            self.split = core.stages(paths.space, cuts)

    def near(self, known: float, most: int) -> tuple[list[Split], float]:
        """All splits whose bounds are below some level, at most `most`, and that level, which is no more than `known`:
        what is found by simulating these is the best there is, or no split is better than the level."""
        paths = self._paths
        if paths is None or paths.loose or known == inf:
            return [], self.bound
        found, level = paths.near(known, most)
        return [paths.space.stages(cuts) for cuts in found], max(level, self.bound)


def _bound_freely(problem: PartitionProblem) -> float:
    blocks = problem.blocks.blocks
    work = [block.work for block in blocks]
    speeds = dict(zip(problem.placement, problem.speed, strict=True)).values()
    seconds = problem.microbatches * max(sum(work) / sum(speeds), max(work) / max(speeds))
    parameters = sum(block.parameters for block in blocks) * (1 + problem.optimizer_factor)
    return problem.objective(seconds, parameters / problem.ranks)


def _bound_time_and_memory(problem: PartitionProblem, paths: _Paths) -> tuple[float, Cuts]:
    """Bound time and memory together, by branch and bound over the bytes that a stage may have."""
    second, byte = problem.rates

    def ask(cap: float) -> Found[Cuts] | None:
        seconds, cuts = paths.fastest(cap)
        return Found(seconds * second, seconds * second, paths.peak(cuts), cuts) if cuts else None

    answer = find_least(paths.sizes, ask, byte, tolerance=1e-3, most=60)
    whole = problem.objective(0.0, bound_memory(problem))
    return max(answer.bound, whole), answer.found[0][1] if answer.found else ()


@dataclass(frozen=True)
class _StageArcs:
    """The pairs of downsets that can be one stage, ordered by the larger one, and what each says of the step as this
    stage.

    The values in `plain` are those of `StageBound.plain`.
    """

    lower: Indices
    upper: Indices
    seconds: Floats
    size: Floats
    plain: Floats

    def only(self, keep: NDArray[np.bool_]) -> _StageArcs:
        return _StageArcs(*(getattr(self, field.name)[keep] for field in fields(self)))


class _Paths:
    """Arcs of the stages of one problem, without what cannot be in a split of which no stage works longer than the step
    that is known."""

    def __init__(self, core: Core, problem: PartitionProblem, known: float) -> None:
        self.problem = problem = replace(problem, blocks=core.blocks)
        self.space = space = Space(core.blocks, core.downsets)
        self.loose = [core.whole.blocks[index].work for index in sorted(core.loose)]
        self._known = known
        work = space.between(lambda index: core.blocks.blocks[index].work)
        before = space.total(np.array([block.work for block in core.blocks.blocks]))
        # Seconds that one stage works at most on a micro-batch.
        each = min(known / problem.microbatches, before[-1] / min(problem.speed)) * (1 + 1e-9)
        index = np.flatnonzero(work <= each * max(problem.speed))
        floor = StageBound(problem, space, index)
        lower, upper, work = space.lower[index], space.upper[index], work[index]
        self._stages = []
        for stage, (speed, most) in enumerate(zip(problem.speed, problem.memory, strict=True)):
            at = np.flatnonzero(
                (work <= each * speed)
                & (before[lower] <= each * sum(problem.speed[:stage]))
                & (before[-1] - before[upper] <= each * sum(problem.speed[stage + 1 :]))
            )
            size = floor.bytes(stage, at)
            fits = size <= (inf if most is None else most)
            at, size = at[fits], size[fits]
            self._stages.append(
                _StageArcs(lower[at], upper[at], floor.seconds(stage, at), size, floor.plain(stage, at))
            )

    def fastest(self, cap: float) -> tuple[float, Cuts]:
        """The least seconds when no stage has more than `cap` bytes, and the cuts; none if there are none."""
        stages = self._stages if cap == inf else [arcs.only(arcs.size <= cap) for arcs in self._stages]
        seconds, cuts = self._path(stages, [arcs.seconds for arcs in stages], np.maximum)
        return self._with_loose(stages, seconds, cuts) if cuts and self.loose else (seconds, cuts)

    def _with_loose(self, stages: Sequence[_StageArcs], seconds: float, cuts: Cuts) -> tuple[float, Cuts]:
        """The least step in which stages have time left for the loose blocks, too."""
        m, speeds = self.problem.microbatches, self.problem.speed
        extra = m * sum(self.loose)

        def fits(step: float) -> Cuts:
            some = [arcs.only(arcs.seconds <= step) for arcs in stages]
            plain = [arcs.plain * speed for arcs, speed in zip(some, speeds, strict=True)]
            used, found = self._path(some, plain, np.add)
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
        second, byte = self.problem.rates
        fast, _ = self._path(self._stages, [arcs.seconds for arcs in self._stages], np.maximum)
        small, _ = self._path(self._stages, [arcs.size for arcs in self._stages], np.maximum)
        stages = []
        for arcs in self._stages:  # what each says of the objective, in place of the seconds alone
            worth = np.maximum(arcs.seconds * second + small * byte, fast * second + arcs.size * byte)
            stages.append(replace(arcs, seconds=worth).only(worth < known))
        levels = np.unique(np.concatenate([arcs.seconds for arcs in stages]))
        low, high = -1, len(levels) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._ways(stages, levels[middle]) <= most else (low, middle - 1)
        beyond = float(levels[low + 1]) if low + 1 < len(levels) else known
        if low < 0:
            return [], beyond
        stages = [arcs.only(arcs.seconds <= levels[low]) for arcs in stages]
        ends = np.arange(self.space.size) == self.space.size - 1  # from where there is a way to the end
        good: list[_StageArcs] = []
        for arcs in reversed(stages):
            good.insert(0, arcs.only(ends[arcs.upper]))
            ends = np.bincount(good[0].lower, minlength=self.space.size) > 0
        found: list[Cuts] = [()]
        for arcs in good:
            found = [(*cuts, int(cut)) for cuts in found for cut in arcs.upper[arcs.lower == (cuts[-1] if cuts else 0)]]
        return found, beyond

    def _ways(self, stages: Sequence[_StageArcs], level: float) -> float:
        """Return the number of splits that have no stage above a level."""
        ways: NDArray[Any] = np.zeros(self.space.size)
        ways[0] = 1.0
        for arcs in stages:
            ways = np.bincount(arcs.upper, ways[arcs.lower] * (arcs.seconds <= level), self.space.size)
        return float(ways[-1])

    def peak(self, cuts: Cuts) -> float:
        """Bytes of the fullest stage."""
        stages = zip(self._stages, (0, *cuts), cuts, strict=False)
        return max(
            (float(each.size[(each.lower == low) & (each.upper == up)][0]) for each, low, up in stages if low != up),
            default=0.0,
        )

    @property
    def sizes(self) -> list[float]:
        """All bytes that a stage may have, ascending."""
        found: list[float] = np.unique(np.concatenate([np.zeros(1), *(arcs.size for arcs in self._stages)])).tolist()
        return found

    def _path(self, stages: Sequence[_StageArcs], costs: Sequence[Floats], join: np.ufunc) -> tuple[float, Cuts]:
        """The least of what `join` makes of one arc for each stage, and the cuts; infinity and none without a way."""
        tables = [np.full(self.space.size, inf)]
        tables[0][0] = 0.0
        for arcs, cost in zip(stages, costs, strict=True):
            row = np.full(self.space.size, inf)
            if len(cost):
                reached, starts = np.unique(arcs.upper, return_index=True)
                row[reached] = np.minimum.reduceat(join(tables[-1][arcs.lower], cost), starts)
            tables.append(np.minimum(row, tables[-1]) if self.loose else row)  # a stage may be of loose blocks alone
        if not np.isfinite(tables[-1][-1]):
            return inf, ()
        cuts = [self.space.size - 1]
        for stage in reversed(range(1, len(costs))):
            arcs = stages[stage]
            start, stop = (int(np.searchsorted(arcs.upper, cuts[-1], side=side)) for side in ("left", "right"))
            each = join(tables[stage][arcs.lower[start:stop]], costs[stage][start:stop])
            stays = self.loose and tables[stage][cuts[-1]] <= each.min(initial=inf)
            cuts.append(cuts[-1] if stays else int(arcs.lower[start + int(np.argmin(each))]))
        return float(tables[-1][-1]), tuple(reversed(cuts))
