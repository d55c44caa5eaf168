"""Splits seen by the simulator of the real schedule, and made better by moving blocks between neighbouring stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from everstep.pipeline.graph import Device, Graph, Links, stage_graph
from everstep.pipeline.partition.blocks import assign_nodes
from everstep.pipeline.partition.problem import Judged, PartitionProblem
from everstep.pipeline.schedules import Result, Schedule, simulate_schedule

ACTIONS = 300_000  # for one plan so many actions and messages are simulated, and nodes put together: seconds
SIGHTS = 32, 600  # but no fewer, and no more splits
FEW = 400  # splits that are all simulated
NEAR = 1e-3  # a split so little above the bound is not made better

Split = tuple[int, ...]  # the stage of each block


class Referee:
    """Judges splits by the simulator; each is simulated once."""

    def __init__(
        self,
        graph: Graph,
        problem: PartitionProblem,
        schedule: Schedule,
        devices: Sequence[Device],
        links: Links | None,
    ) -> None:
        self.problem = problem
        self._graph, self._schedule, self._devices, self._links = graph, schedule, devices, links
        self._seen: dict[Split, Judged] = {}
        self.best = inf  # the least objective that was seen
        self._each = sum(map(len, schedule.ranks)) + len(graph.nodes)
        #: As many splits as are simulated in a second or so.
        self.sights = max(SIGHTS[0], min(FEW, ACTIONS // (2 * self._each)))
        self._left = ACTIONS

    @property
    def tired(self) -> bool:
        """Tell whether enough splits were simulated."""
        fewest, most = SIGHTS
        return len(self._seen) >= most or (self._left <= 0 and len(self._seen) >= fewest)

    def see(self, split: Split) -> Judged:
        """Seconds of a step and bytes of the fullest rank; the objective is infinite if a rank has too many."""
        if split not in self._seen:
            self._seen[split] = seen = self._simulate(split)
            self.best = min(self.best, seen.objective)
        return self._seen[split]

    def lacking(self, split: Split) -> tuple[int, int, int]:
        """Return the rank that lacks most in a split that does not fit, the bytes that it needs, and those it has."""
        _, held = self._held(split)
        sizes = [(size, each.memory) for size, each in zip(held, self._devices, strict=True)]
        rank = max(range(len(sizes)), key=lambda each: _count_lacking_bytes(*sizes[each]))
        held_there, most = sizes[rank]
        assert most is not None, "it does not fit"
        return rank, held_there, most

    def order(self, split: Split) -> tuple[float, float, float]:
        return self.see(split).order

    def _simulate(self, split: Split) -> Judged:
        result, held = self._held(split)
        over = max(_count_lacking_bytes(size, device.memory) for size, device in zip(held, self._devices, strict=True))
        objective = inf if over else self.problem.objective(result.makespan, max(held))
        return Judged(result.makespan, max(held), objective, over)

    def _held(self, split: Split) -> tuple[Result, list[int]]:
        """Return what the simulator says, and the bytes of each rank."""
        graph = stage_graph(self._graph, assign_nodes(self.problem.blocks, split))
        self._left -= self._each + 2 * len(graph.edges) * self._schedule.microbatches
        result = simulate_schedule(self._schedule, graph, self._devices, self._links)
        held = [kept + waiting for kept, waiting in zip(result.peak, result.waiting, strict=True)]
        for stage, rank in enumerate(self._schedule.placement):
            held[rank] += round(graph.stages[stage].parameters * (1 + self.problem.optimizer_factor))
        return result, held


def _count_lacking_bytes(size: int, memory: int | None) -> int:
    return 0 if memory is None else max(0, size - memory)


def climb_splits(referee: Referee, splits: Sequence[Split], best: int, bound: float) -> list[Split]:
    """The best of `splits` and of what single moves make of the best of them, best first; only what fits. `bound`: what
    the objective of every split is at least."""
    known: dict[Split, tuple[float, float, float]] = {}
    few = max(best, 2 * referee.problem.stages)

    def done() -> bool:
        return referee.tired or referee.best <= bound * (1 + NEAR)

    for split in splits:  # all, if the referee can see all and still move the best of them
        if len(known) < few or (len(splits) <= FEW and not done()):
            known[split] = referee.see(split).order
    for start in sorted(known, key=lambda each: known[each])[:best]:
        here = start
        while not done():
            steps = {step: referee.see(step).order for step in _iterate_neighbours(referee, here)}
            known |= steps
            if not steps or min(steps.values()) >= known[here]:
                break
            here = min(steps, key=lambda each: steps[each])
    return sorted((split for split, (over, *_) in known.items() if not over), key=lambda each: known[each])[:best]


def _iterate_neighbours(referee: Referee, split: Split) -> Iterator[Split]:
    """Neighbours of a split, most promising by the surrogate first, as many as the referee still looks at."""
    near = {step: referee.problem.judge(step) for step in _iterate_moves(referee.problem, split)}
    for step in sorted(near, key=lambda each: near[each].order)[: 4 * referee.problem.stages]:
        if not referee.tired:
            yield step


def _iterate_moves(problem: PartitionProblem, split: Split) -> Iterator[Split]:
    """Yield the splits that move, over each border and either way, one block that may go, or the nearest 2, 4, 8 … in
    order."""
    before, after = problem.blocks.before, problem.blocks.after
    for border in range(1, problem.stages):
        for source, target, held in ((border - 1, border, after), (border, border - 1, before)):
            members = [block for block, stage in enumerate(split) if stage == source]
            loose = [block for block in members if all(split[other] != source for other in held[block])]
            if len(members) > 1:
                for block in loose:
                    yield _move_blocks(split, [block], target)
            ordered = members[::-1] if target > source else members
            count = 2
            while count < len(members):
                yield _move_blocks(split, ordered[:count], target)
                count *= 2


def _move_blocks(split: Split, blocks: Sequence[int], target: int) -> Split:
    changed = list(split)
    for block in blocks:
        changed[block] = target
    return tuple(changed)
