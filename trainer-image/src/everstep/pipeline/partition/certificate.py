"""Bound the objective of every split from below: without search, and by a mixed-integer programme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from everstep.pipeline.errors import PipelineError
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
    words = 1 + problem.words
    shared = problem.blocks.shared
    each = [
        (block.parameters + sum(shared[number] for number in block.shared)) * words + block.activation * kept
        for block in blocks
    ]
    used = {number for block in blocks for number in block.shared}
    total = sum(block.parameters * words + block.activation * kept for block in blocks)
    total += sum(shared[number] for number in used) * words
    return max(max(each), total / problem.ranks)


@dataclass(frozen=True)
class Certificate:
    """`stages` of each block, of the best split that was found in time (None: none was); `bound` is proven."""

    stages: tuple[int, ...] | None
    bound: float


def prove_bound(problem: PartitionProblem, seconds: float = 60.0) -> Certificate:
    """Solves the whole problem as a mixed-integer programme with HiGHS, within a time limit in seconds.

    PipelineError if no split fits, if a rank has several stages, or scipy is not installed.
    """
    if problem.ranks != problem.stages:
        raise PipelineError("the mixed-integer programme knows one stage on each rank only")
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ModuleNotFoundError as error:
        raise PipelineError("scipy is not installed: pip install 'everstep[pipeline]'") from error

    model = _Model(problem)
    matrix, low, high = model.rows()
    answer = milp(
        model.costs,
        integrality=model.integral,
        bounds=Bounds(model.low, model.high),
        constraints=LinearConstraint(matrix, low, high),
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    if answer.status == 2:
        raise PipelineError("no split fits the memory of the devices")
    stages = None
    if answer.x is not None:
        count = len(problem.blocks.blocks)
        stages = tuple(
            sum(answer.x[model.after(block, stage)] > 0.5 for stage in range(1, problem.stages))
            for block in range(count)
        )
    dual = -inf if answer.mip_dual_bound is None else float(answer.mip_dual_bound)
    return Certificate(
        stages, max(compute_bound(problem), dual * (1.0 if problem.memory_weight else problem.time_scale))
    )


class _Model:
    """The problem in units of a perfect split, which are near 1 as the solver likes numbers to be.

    Variables: whether a block is at or after a stage (it only rises along values), what a stage uses of a value or
    of a shared parameter, what leaves it, the dearest stage, the fullest device.
    """

    def __init__(self, problem: PartitionProblem) -> None:
        self.problem = problem
        self.costs: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.integral: list[int] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []
        blocks, stages = problem.blocks.blocks, problem.stages
        self._after = [
            [
                self._variable(1.0 if stage == 0 else 0.0, 0.0 if stage == stages else 1.0, integral=True)
                for stage in range(stages + 1)
            ]
            for _ in blocks
        ]
        weight = problem.memory_weight
        top = self._variable(0.0, inf, (problem.microbatches - 1) * (1 - weight))
        peak = self._variable(0.0, inf, weight)
        for block in range(len(blocks)):
            for stage in range(stages):
                self._atmost({self.after(block, stage + 1): 1.0, self.after(block, stage): -1.0}, 0.0)
        for stage in range(stages):
            used: dict[int, float] = {}
            for block in range(len(blocks)):
                self._add(used, self._at(block, stage), -1.0)
            self._atmost(used, -1.0)  # no stage is empty
        for value in problem.blocks.values:
            for consumer in value.consumers:
                for stage in range(1, stages):
                    self._atmost({self.after(value.producer, stage): 1.0, self.after(consumer, stage): -1.0}, 0.0)
        times = [self._time(stage) for stage in range(stages)]
        for stage, time in enumerate(times):
            for variable, factor in time.items():
                self.costs[variable] += factor * (1 - weight)
            self._atmost({**time, top: -1.0}, 0.0)
            memory = self._memory(stage)
            self._atmost({**memory, peak: -1.0}, 0.0)
            if (limit := problem.memory[stage]) is not None:
                self._atmost(memory, limit / problem.memory_scale)

    def after(self, block: int, stage: int) -> int:
        """Return the variable that tells whether a block is in this stage or a later one."""
        return self._after[block][stage]

    def rows(self) -> tuple[Any, list[float], list[float]]:
        from scipy.sparse import csr_array

        entries = [
            (row, column, factor) for row, (each, _, _) in enumerate(self._rows) for column, factor in each.items()
        ]
        rows, columns, factors = zip(*entries, strict=True)
        matrix = csr_array((factors, (rows, columns)), shape=(len(self._rows), len(self.costs)))
        return matrix, [low for _, low, _ in self._rows], [high for _, _, high in self._rows]

    def _variable(self, low: float, high: float, cost: float = 0.0, *, integral: bool = False) -> int:
        self.costs.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def _atmost(self, row: dict[int, float], high: float) -> None:
        self._rows.append((row, -inf, high))

    def _at(self, block: int, stage: int) -> dict[int, float]:
        return {self.after(block, stage): 1.0, self.after(block, stage + 1): -1.0}

    @staticmethod
    def _add(total: dict[int, float], part: dict[int, float], factor: float) -> None:
        for variable, each in part.items():
            total[variable] = total.get(variable, 0.0) + factor * each

    def _time(self, stage: int) -> dict[int, float]:
        problem = self.problem
        time: dict[int, float] = {}
        for index, block in enumerate(problem.blocks.blocks):
            self._add(time, self._at(index, stage), block.work / problem.speed[stage] / problem.time_scale)
        for value in problem.blocks.values:
            if stage and (seconds := problem.incoming(stage).seconds(value)):
                received = self._variable(0.0, 1.0)
                time[received] = seconds / problem.time_scale
                for consumer in value.consumers:  # used here, and made before
                    row = {received: -1.0, self.after(value.producer, stage): -1.0}
                    self._add(row, self._at(consumer, stage), 1.0)
                    self._atmost(row, 0.0)
            if stage < problem.stages - 1 and (seconds := problem.outgoing(stage).seconds(value)):
                given = self._variable(0.0, 1.0)
                time[given] = seconds / problem.time_scale
                for consumer in value.consumers:  # made here, and used later
                    row = {given: -1.0, self.after(consumer, stage + 1): 1.0}
                    self._add(row, self._at(value.producer, stage), 1.0)
                    self._atmost(row, 1.0)
        return time

    def _memory(self, stage: int) -> dict[int, float]:
        problem = self.problem
        memory: dict[int, float] = {}
        words = (1 + problem.words) / problem.memory_scale
        users: dict[int, list[int]] = {}
        for index, block in enumerate(problem.blocks.blocks):
            size = block.parameters * words + block.activation * problem.in_flight[stage] / problem.memory_scale
            self._add(memory, self._at(index, stage), size)
            for number in block.shared:
                users.setdefault(number, []).append(index)
        for number, members in users.items():
            held = self._variable(0.0, 1.0)
            memory[held] = problem.blocks.shared[number] * words
            for member in members:
                row = {held: -1.0}
                self._add(row, self._at(member, stage), 1.0)
                self._atmost(row, 0.0)
        return memory
