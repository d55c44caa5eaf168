"""Solve the partition problem as a mixed-integer programme, with which the search is compared. It needs scipy."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.partition.certificate import compute_bound
from everstep.pipeline.partition.problem import PartitionProblem


@dataclass(frozen=True)
class Certificate:
    """`stages` of each block, of the best split that was found in time (None: none was); `bound` is proven."""

    stages: tuple[int, ...] | None
    bound: float


def prove_bound(problem: PartitionProblem, seconds: float = 60.0) -> Certificate:
    """Solve the whole problem as a mixed-integer programme with HiGHS, within a time limit in seconds.

    Raises:
        PipelineError: No split fits, or a rank has several stages.
    """
    if problem.ranks != problem.stages:
        raise PipelineError("the mixed-integer programme knows one stage on each rank only")
    from scipy.optimize import Bounds, LinearConstraint, milp

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
        words = (1 + problem.optimizer_factor) / problem.memory_scale
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
