"""What a step takes at least if a stage is what is between two downsets.

Before its first forward one micro-batch has come to it, and after its last backward a gradient goes on to the first
node; between the two are all of its work, the time in which it must stand still because no more micro-batches may be
in flight (until the first gradient is back, and from the last forward on), and what its links carry. Messages cost
ranks no time here, as in the simulator and in the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import inf

import numpy as np

from everstep.pipeline.graph import Link
from everstep.pipeline.partition.blocks import Block, Value
from everstep.pipeline.partition.problem import Problem
from everstep.pipeline.partition.space import Floats, Indices, Space
from everstep.pipeline.partition.way import Way


class Floor:
    """Of pairs of downsets, `index` into those of the space. Work in seconds on a device of speed 1; `head`: seconds
    before the first forward, `tail`: after the last backward, `around`: from the end of a micro-batch's forward to the
    start of its backward."""

    def __init__(self, problem: Problem, space: Space, index: Indices) -> None:
        self._problem, self._space, self._index = problem, space, index
        self._way = way = Way(problem)
        self._forward = self.sum([each.forward for each in self._blocks])
        self._input_grad = self.sum([each.input_grad for each in self._blocks])
        self._weight_grad = self.sum([each.weight_grad for each in self._blocks])

        def gone(value: Value) -> float:
            return way.over(value) + way.gone[value.producer] if value.gradient else 0.0

        def around(value: Value, user: int) -> float:
            return 2 * way.over(value) + way.down[user] if value.gradient else 0.0

        self._head = space.incoming(lambda each: way.over(each) + way.came[each.producer], np.maximum)[index]
        self._tail = space.incoming(gone, np.maximum)[index]
        self._around = space.onward(around, np.maximum, 0.0)[index]

    @property
    def _blocks(self) -> tuple[Block, ...]:
        return self._problem.blocks.blocks

    def sum(self, of_block: list[float]) -> Floats:
        return self._space.between(of_block.__getitem__)[self._index]

    def bytes(self, stage: int) -> Floats:
        blocks, problem = self._blocks, self._problem
        parameters = self.sum([each.parameters for each in blocks]) + self._space.shared[self._index]
        return (
            parameters * (1 + problem.words) + self.sum([each.activation for each in blocks]) * problem.in_flight[stage]
        )

    def plain(self, stage: int) -> Floats:
        """Seconds of the step, to which those of more work in the stage come as they are."""
        forward, back, late = self._work(stage)
        tail = 0.0 if self._problem.split[stage] else self._tail
        return self._head + self._problem.microbatches * (forward + back + late) + tail

    def seconds(self, stage: int) -> Floats:
        """Seconds of the step, with all that is known of this stage."""
        problem, head, tail = self._problem, self._head, self._tail
        m, kept = problem.microbatches, problem.in_flight[stage]
        forward, back, late = self._work(stage)
        # From the first forward to the first backward no more than `kept` forwards, and as many backwards at the end.
        early = np.maximum(0.0, self._around - (kept - 1) * forward)
        final = np.maximum(0.0, self._around - (kept - 1) * back)
        still = early + final if kept < m else np.maximum(early, final)
        turn = forward + self._around + back  # of one micro-batch, from its forward to the end of its backward
        found: Floats = np.maximum(
            np.maximum(
                head + m * (forward + back) + still + tail,
                head + m * (forward + back + late) + early,  # weight gradients may be last of all
            ),
            head + m * turn / kept + tail,
        )
        if problem.links is None:
            return found
        here, links = problem.placement[stage], problem.links
        before = [problem.placement[each] for each in range(stage)]
        after = [problem.placement[each] for each in range(stage + 1, problem.stages)]
        for first, size, last in (  # until a link may begin, what it carries, what follows when all is there
            (self._first, self._received / _together(links[each][here] for each in before), turn + tail),
            (head + turn, self._returned / _together(links[here][each] for each in before), self._last),
            (head + forward, self._given / _together(links[here][each] for each in after), self._other + back + tail),
            (head + forward + self._other, self._given / _together(links[each][here] for each in after), back + tail),
        ):
            found = np.maximum(found, np.where(size > 0, first + m * size + last, 0.0))
        return found

    def _work(self, stage: int) -> tuple[Floats, Floats, Floats]:
        """Forward, the backward that others wait for, and the rest."""
        speed = self._problem.speed[stage]
        if self._problem.split[stage]:
            return self._forward / speed, self._input_grad / speed, self._weight_grad / speed
        return self._forward / speed, (self._input_grad + self._weight_grad) / speed, np.zeros(len(self._index))

    @cached_property
    def _received(self) -> Floats:
        return self._space.incoming(lambda each: each.size)[self._index]

    @cached_property
    def _returned(self) -> Floats:
        return self._space.incoming(lambda each: each.size * each.gradient)[self._index]

    @cached_property
    def _given(self) -> Floats:
        """And brought back: values without gradient go without those who wait for them."""
        return self._space.outgoing(lambda each: each.size * each.gradient)[self._index]

    # The least of all values: nobody knows which is the first or the last one on a link.

    @cached_property
    def _first(self) -> Floats:
        return self._least(self._space.incoming(lambda each: self._way.came[each.producer], np.minimum, inf))

    @cached_property
    def _last(self) -> Floats:
        return self._least(
            self._space.incoming(lambda each: self._way.gone[each.producer] if each.gradient else inf, np.minimum, inf)
        )

    @cached_property
    def _other(self) -> Floats:
        def back(value: Value, user: int) -> float:
            return self._way.down[user] + self._way.over(value) if value.gradient else inf

        return self._least(self._space.onward(back, np.minimum, inf))

    def _least(self, found: Floats) -> Floats:
        mine = found[self._index]
        return np.where(np.isfinite(mine), mine, 0.0) + self._way.link.latency


def _together(links: Iterable[Link]) -> float:
    """Bytes per second of links side by side."""
    return sum(link.bandwidth for link in links) or inf
