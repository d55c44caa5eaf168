"""Bound the time of a step from below, given that a stage is what is between two downsets.

Before its first forward one micro-batch has come to it, and after its last backward a gradient goes on to the first
node; between the two are all of its work, the time in which it must stand still because no more micro-batches may be in
flight (until the first gradient is back, and from the last forward on), and what its links carry. Messages cost ranks
no time here, as in the simulator and in the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import numpy as np

from everstep.pipeline.graph import Link
from everstep.pipeline.partition.problem import PartitionProblem
from everstep.pipeline.partition.space import Floats, Indices, Joined, Space
from everstep.pipeline.partition.way import CriticalPath


class StageBound:
    """The lower bounds on a step of pairs of downsets: `index` selects them from those of the space, `at` picks some of
    these.

    Work is in seconds on a device of speed 1; `head`: seconds before the first forward, `tail`: after the last
    backward, `around`: from the end of a micro-batch's forward to the start of its backward.
    """

    def __init__(self, problem: PartitionProblem, space: Space, index: Indices) -> None:
        self._problem, self._space, self._index = problem, space, index
        self._way = CriticalPath(problem)
        blocks = problem.blocks.blocks
        self._forward = self._sum([each.forward for each in blocks])
        self._input_grad = self._sum([each.input_grad for each in blocks])
        self._weight_grad = self._sum([each.weight_grad for each in blocks])
        self._parameters = self._sum([each.parameters for each in blocks]) + space.shared[index]
        self._activation = self._sum([each.activation for each in blocks])
        self._flow()

    def _sum(self, of_block: list[float]) -> Floats:
        return self._space.between(of_block.__getitem__)[self._index]

    def _flow(self) -> None:
        way, space = self._way, self._space
        came = Joined(lambda each: way.over(each) + way.came[each.producer], np.maximum)
        gone = Joined(lambda each: (way.over(each) + way.gone[each.producer]) * each.gradient, np.maximum)
        around = Joined(lambda each, user: (2 * way.over(each) + way.down[user]) * each.gradient, np.maximum)
        # On a link the least of all values counts: nobody knows which is the first or the last one.
        first = Joined(lambda each: way.came[each.producer], np.minimum, inf)
        last = Joined(lambda each: way.gone[each.producer] if each.gradient else inf, np.minimum, inf)
        other = Joined(lambda each, user: way.down[user] + way.over(each) if each.gradient else inf, np.minimum, inf)
        links = self._problem.links is not None
        sizes = [Joined(lambda each: each.size), Joined(lambda each: each.size * each.gradient), first, last]
        into = [each[self._index] for each in space.received([came, gone, *(sizes if links else [])])]
        out = [each[self._index] for each in space.onward([around, *([other] if links else [])])]
        self._head, self._tail, self._around = into[0], into[1], out[0]
        if links:
            self._received, self._returned = into[2:4]
            # And brought back: values without gradient go without those who wait for them.
            self._given = space.outgoing(lambda each: each.size * each.gradient)[self._index]
            late = way.link.latency
            self._first, self._last, self._other = (
                np.where(np.isfinite(each), each, 0.0) + late for each in (*into[4:6], out[1])
            )

    def bytes(self, stage: int, at: Indices) -> Floats:
        """Return the bytes of the stage's parameters and what comes with them, and of the micro-batches in flight."""
        problem = self._problem
        found: Floats = self._parameters[at] * (1 + problem.optimizer_factor)
        return found + self._activation[at] * problem.in_flight[stage]

    def plain(self, stage: int, at: Indices) -> Floats:
        """Seconds of the step, to which those of more work in the stage come as they are."""
        forward, back, late = self._work(stage, at)
        found: Floats = self._head[at] + self._problem.microbatches * (forward + back + late)
        return found if self._problem.split[stage] else found + self._tail[at]

    def seconds(self, stage: int, at: Indices) -> Floats:
        """Seconds of the step, with all that is known of this stage."""
        problem, head, tail, around = self._problem, self._head[at], self._tail[at], self._around[at]
        m, kept = problem.microbatches, problem.in_flight[stage]
        forward, back, late = self._work(stage, at)
        # From the first forward to the first backward no more than `kept` forwards, and as many backwards at the end.
        early = np.maximum(0.0, around - (kept - 1) * forward)
        final = np.maximum(0.0, around - (kept - 1) * back)
        still = early + final if kept < m else np.maximum(early, final)
        turn = forward + around + back  # of one micro-batch, from its forward to the end of its backward
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
        given, other = self._given[at], self._other[at]
        for first, size, last in (  # until a link may begin, what it carries, what follows when all is there
            (self._first[at], self._received[at] / _add_bandwidths(links[each][here] for each in before), turn + tail),
            (head + turn, self._returned[at] / _add_bandwidths(links[here][each] for each in before), self._last[at]),
            (head + forward, given / _add_bandwidths(links[here][each] for each in after), other + back + tail),
            (head + forward + other, given / _add_bandwidths(links[each][here] for each in after), back + tail),
        ):
            found = np.maximum(found, np.where(size > 0, first + m * size + last, 0.0))
        return found

    def _work(self, stage: int, at: Indices) -> tuple[Floats, Floats, Floats]:
        """Forward, the backward that others wait for, and the rest.

        A stage that nobody waits for has all of its backward with its weights: what is said here holds of it too, as a
        micro-batch is in flight until then.
        """
        speed = self._problem.speed[stage]
        forward, back, late = self._forward[at] / speed, self._input_grad[at] / speed, self._weight_grad[at] / speed
        return (forward, back, late) if self._problem.split[stage] else (forward, back + late, np.zeros(len(at)))


def _add_bandwidths(links: Iterable[Link]) -> float:
    """Bytes per second of links side by side."""
    return sum(link.bandwidth for link in links) or inf
