"""Judge partitions: define the surrogate of a step's time, its memory, and the words for a request.

The surrogate of the time of a step is `sum_i t_i + (m - 1) · max_r T_r`: t_i is the time of stage i per micro-batch,
T_r that of all stages of rank r (with one stage on each rank this is Alpa's objective, arXiv 2201.12023). t_i is the
work over the device's speed, and the links' time of every value that stage i receives from others and of every value
that it gives to others, once, with the gradients on their way back. Links are those between neighbouring stages: where
a skipping value goes another way, the simulator knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from everstep.pipeline.graph import Link, Links
from everstep.pipeline.partition.blocks import Blocks, BlockValue

OPTIMIZER_FACTOR = 3.0  # the gradient, and Adam's two moments


@dataclass(frozen=True)
class Hop:
    """The cost of a value between two neighbouring stages: a link for it, one for its gradient; None on one rank."""

    there: Link | None
    back: Link | None

    def seconds(self, value: BlockValue) -> float:
        time = 0.0
        if self.there is not None:
            time += self.there.seconds(value.size)
        if self.back is not None and value.gradient:
            time += self.back.seconds(value.size)
        return time


NOWHERE = Hop(None, None)


@dataclass(frozen=True)
class PartitionProblem:
    """`placement`: the rank of each stage; `speed`, `memory` (None: no limit) and `in_flight` of each stage; `hops`
    between neighbouring stages, one fewer, `links` those between all ranks. `optimizer_factor`: bytes beside each byte
    of parameters. `split`: the stages that split their backward.

    The objective is seconds if `memory_weight` is 0, else `(1 - w) · seconds / time_scale + w · peak / memory_scale`,
    with scales of a perfect split.
    """

    blocks: Blocks
    placement: tuple[int, ...]
    speed: tuple[float, ...]
    memory: tuple[int | None, ...]
    hops: tuple[Hop, ...]
    in_flight: tuple[int, ...]
    microbatches: int
    optimizer_factor: float = OPTIMIZER_FACTOR
    memory_weight: float = 0.0
    links: Links | None = None
    split: tuple[bool, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def ranks(self) -> int:
        return len(set(self.placement))

    def incoming(self, stage: int) -> Hop:
        """The hop of what stage `stage` receives."""
        return self.hops[stage - 1] if stage else NOWHERE

    def outgoing(self, stage: int) -> Hop:
        return self.hops[stage] if stage < self.stages - 1 else NOWHERE

    @cached_property
    def time_scale(self) -> float:
        work = sum(block.work for block in self.blocks.blocks) or 1.0
        ranks = dict(zip(self.placement, self.speed, strict=True))
        return work * (self.microbatches - 1 + self.ranks) / sum(ranks.values())

    @cached_property
    def memory_scale(self) -> float:
        parameters = sum(block.parameters for block in self.blocks.blocks) + sum(self.blocks.shared)
        activation = sum(block.activation for block in self.blocks.blocks)
        each = sum(self.in_flight) / self.stages
        return (parameters * (1 + self.optimizer_factor) + activation * each) / self.ranks or 1.0

    @cached_property
    def rates(self) -> tuple[float, float]:
        """Return what a second of the step, and a byte of the fullest rank, add to the objective."""
        if not self.memory_weight:
            return 1.0, 0.0
        return (1 - self.memory_weight) / self.time_scale, self.memory_weight / self.memory_scale

    def objective(self, seconds: float, peak: float) -> float:
        return self.rates[0] * seconds + self.rates[1] * peak

    def judge(self, stages: Sequence[int]) -> Judged:
        """Judge a split by the surrogate; `stages` is the stage of each block."""
        import numpy as np

        at, arrays, count = np.array(stages), self._arrays, self.stages
        times = np.bincount(at, arrays.work, count) / arrays.speed
        bytes_ = np.bincount(at, arrays.parameters, count) * (1 + self.optimizer_factor)
        bytes_ += np.bincount(at, arrays.activation, count) * arrays.in_flight
        used = np.unique(at[arrays.user] * len(arrays.shared) + arrays.used)
        if len(used):
            bytes_ += np.bincount(used // len(arrays.shared), arrays.shared[used % len(arrays.shared)], count) * (
                1 + self.optimizer_factor
            )
        source, target = at[arrays.producer], at[arrays.consumer]
        cut = np.unique((target * len(self.blocks.values) + arrays.value)[source != target])
        if len(cut):
            to, value = np.divmod(cut, len(self.blocks.values))
            times += np.bincount(to, arrays.incoming[to, value], count)
            value = np.unique(value)
            of = at[arrays.made[value]]
            times += np.bincount(of, arrays.outgoing[of, value], count)
        return self._judged(times.tolist(), bytes_.tolist())

    @cached_property
    def _arrays(self) -> _Arrays:
        return _Arrays(self)

    def _judged(self, times: list[float], bytes_: list[float]) -> Judged:
        busy = dict.fromkeys(self.placement, 0.0)
        held = dict.fromkeys(self.placement, 0.0)
        limit = dict(zip(self.placement, self.memory, strict=True))
        for rank, seconds, size in zip(self.placement, times, bytes_, strict=True):
            busy[rank] += seconds
            held[rank] += size
        seconds = sum(times) + (self.microbatches - 1) * max(busy.values())
        peak = max(held.values())
        over = max(0.0 if most is None else max(0.0, held[rank] - most) for rank, most in limit.items())
        return Judged(seconds, peak, inf if over else self.objective(seconds, peak), over)


@dataclass(frozen=True)
class Judged:
    """Seconds and bytes of the fullest rank; `over`: by how many bytes a rank has too many, then `objective` is
    infinite."""

    seconds: float
    peak: float
    objective: float
    over: float = 0.0

    @property
    def order(self) -> tuple[float, float, float]:
        """The lower, the better; of what does not fit, what is nearest to fitting."""
        return self.over, self.objective, self.seconds


class _Arrays:
    """A problem as arrays: of blocks, of pairs of a value and a consumer, of values by stage, of shared parameters and
    their users."""

    def __init__(self, problem: PartitionProblem) -> None:
        import numpy as np

        blocks, values = problem.blocks.blocks, problem.blocks.values
        stages = range(problem.stages)
        self.work = np.array([block.work for block in blocks])
        self.parameters = np.array([float(block.parameters) for block in blocks])
        self.activation = np.array([float(block.activation) for block in blocks])
        self.speed = np.array(problem.speed)
        self.in_flight = np.array(problem.in_flight)
        pairs = [(number, consumer) for number, value in enumerate(values) for consumer in value.consumers]
        self.value = np.array([number for number, _ in pairs], np.int64)
        self.consumer = np.array([consumer for _, consumer in pairs], np.int64)
        self.made = np.array([value.producer for value in values], np.int64)
        self.producer = self.made[self.value]
        self.incoming = np.array([[problem.incoming(stage).seconds(value) for value in values] for stage in stages])
        self.outgoing = np.array([[problem.outgoing(stage).seconds(value) for value in values] for stage in stages])
        uses = [(index, number) for index, block in enumerate(blocks) for number in block.shared]
        self.user = np.array([index for index, _ in uses], np.int64)
        self.used = np.array([number for _, number in uses], np.int64)
        self.shared = np.array(problem.blocks.shared, np.float64)
