"""Compute the time of each action, and what is held meanwhile: one discrete-event simulator for plans, orders and
pictures.

A rank does its actions in order, each as soon as what it needs is there. A directed pair of ranks is a link that
carries one message at a time, in the order in which they were sent. Overlapped messages cost a rank that computes the
share of their time that their link holds it; blocking ones hold both ranks until the last byte is there. Reductions are
not timed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Device, Links, StageGraph
from everstep.pipeline.schedules.actions import COMPUTE, MESSAGES, Action, ActionKind, Schedule
from everstep.pipeline.schedules.flow import GRADIENTS, LAST, Done, Flow, Message


class SimulatedAction(NamedTuple):
    """An action of a rank; seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Result:
    """Seconds and bytes of one step.

    `spans`: of each rank, from the start of its first computation to the end of its last; `busy`: the sum of them.
    `peak`: of each rank, the most bytes of activations kept for backward; `waiting`: the most bytes of values that have
    come and are not used up. `timeline`: by rank, then in order; messages only where they hold a rank.
    """

    makespan: float
    spans: tuple[float, ...]
    busy: tuple[float, ...]
    peak: tuple[int, ...]
    waiting: tuple[int, ...]
    timeline: tuple[SimulatedAction, ...]

    @property
    def bubble(self) -> float:
        """Seconds by which the step is longer than the work of the busiest rank."""
        return self.makespan - max(self.busy)

    @property
    def bubble_ratio(self) -> float:
        """The bubble over the work of the busiest rank; 0 if there is none."""
        return self.bubble / max(self.busy) if max(self.busy) else 0.0


def simulate_schedule(
    schedule: Schedule,
    graph: StageGraph,
    devices: Sequence[Device] | None = None,
    links: Links | None = None,
    *,
    blocking: bool = False,
) -> Result:
    """Simulate one step of a schedule.

    Args:
        schedule: The schedule. If it was not lowered, it sends everything as soon as it is there.
        graph: The graph of stages.
        devices: One for each rank; None for speed 1.
        links: The links of all pairs of ranks; None if they cost nothing.
        blocking: Whether messages hold both ranks until the last byte is there; the schedule must then be lowered.

    Raises:
        PipelineError: The schedule comes to a stand (the message has what each rank waits for), or there are too few
            devices or links.
    """
    return _SimulationRun(schedule, Flow(graph, schedule.placement), devices, links, blocking).result()


class _SimulationRun:
    def __init__(
        self,
        schedule: Schedule,
        flow: Flow,
        devices: Sequence[Device] | None,
        links: Links | None,
        blocking: bool,
    ) -> None:
        ranks = len(schedule.ranks)
        if devices is not None and len(devices) != ranks:
            raise PipelineError(f"{len(devices)} devices for {ranks} ranks")
        if links is not None and (len(links) != ranks or any(len(row) != ranks for row in links)):
            raise PipelineError(f"links must be {ranks} rows of {ranks}")
        if blocking and not schedule.lowered and flow.crosses:
            raise PipelineError("messages that block have a place in the order: lower the schedule first")
        self.schedule, self.flow, self.links, self.blocking = schedule, flow, links, blocking
        self.explicit = schedule.lowered
        self.speeds = [device.speed for device in devices] if devices else [1.0] * ranks
        self.free = [0.0] * ranks
        self.position = [0] * ranks
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.times: dict[Done | Message, float] = {}
        self.waiters: dict[Done | Message, int] = {}
        self.held: dict[Message, float] = {}  # for how long a rank that computes is held by what comes
        self.met: dict[Message, float] = {}  # blocking: when the first of the two ranks stood ready
        self.events: list[list[SimulatedAction]] = [[] for _ in range(ranks)]
        self.seconds = [
            {
                ActionKind.FORWARD: stage.forward,
                ActionKind.BACKWARD: stage.backward,
                ActionKind.INPUT_GRAD: stage.input_grad,
                ActionKind.WEIGHT_GRAD: stage.weight_grad,
            }
            for stage in flow.graph.stages
        ]

    def result(self) -> Result:
        self.ready = list(range(len(self.schedule.ranks)))
        while self.ready:
            rank = self.ready.pop()
            actions = self.schedule.ranks[rank]
            while self.position[rank] < len(actions) and self._act(rank, actions[self.position[rank]]):
                self.position[rank] += 1
        if any(self.position[rank] < len(actions) for rank, actions in enumerate(self.schedule.ranks)):
            raise PipelineError(self._stand())
        computed = [[event for event in events if event.action.kind in COMPUTE] for events in self.events]
        return Result(
            makespan=max((event.end for events in self.events for event in events), default=0.0),
            spans=tuple(events[-1].end - events[0].start if events else 0.0 for events in computed),
            busy=tuple(sum(event.end - event.start for event in events) for events in computed),
            peak=compute_peak_memory(self.schedule, self.flow.graph),
            waiting=self._waiting(),
            timeline=tuple(event for events in self.events for event in events),
        )

    def _act(self, rank: int, action: Action) -> bool:
        """False if what it needs is not there yet: then whoever brings it wakes the rank."""
        if action.kind in COMPUTE:
            return self._compute(rank, action)
        if action.kind in MESSAGES and self.blocking:
            return self._meet(rank, action)
        if action.kind is ActionKind.SEND:
            self._send(self.flow.message(action), self.free[rank])
        return True

    def _compute(self, rank: int, action: Action) -> bool:
        needs = list(self.flow.needs(action))
        for need in needs:
            if need not in self.times:
                self.waiters[need] = rank
                return False
        held = sum(self.held.pop(need, 0.0) for need in needs if isinstance(need, Message)) if self.held else 0.0
        start = max([self.free[rank] + held, *(self.times[need] for need in needs)])
        end = start + self.seconds[action.stage][action.kind] / self.speeds[rank]
        self.free[rank] = end
        self.events[rank].append(SimulatedAction(rank, action, start, end))
        if action.kind is not ActionKind.WEIGHT_GRAD:
            self._there(Done(action.stage, action.microbatch, action.kind in GRADIENTS), end)
        if not self.explicit:
            for message in self.flow.gives(action, self.times):
                self._send(message, end)
        return True

    def _send(self, message: Message, at: float) -> None:
        if self.links is not None:
            link, pair = self.links[message.source][message.target], (message.source, message.target)
            seconds = self.flow.by_value[message.value].size / link.bandwidth
            if link.held:
                self.free[message.source] += link.held * seconds
                self.held[message] = link.held * seconds
            at = max(at, self.link_free[pair]) + seconds
            self.link_free[pair] = at
            at += link.latency
        self._there(message, at)

    def _meet(self, rank: int, action: Action) -> bool:
        message = self.flow.message(action)
        if message not in self.times:
            if message not in self.met:
                self.met[message], self.waiters[message] = self.free[rank], rank
                return False
            start = max(self.met[message], self.free[rank])
            seconds = 0.0
            if self.links is not None:
                link = self.links[message.source][message.target]
                seconds = link.seconds(self.flow.by_value[message.value].size)
            self._there(message, start + seconds)
        end = self.times[message]
        self.events[rank].append(SimulatedAction(rank, action, self.free[rank], end))
        self.free[rank] = end
        return True

    def _there(self, what: Done | Message, at: float) -> None:
        self.times[what] = at
        if (rank := self.waiters.pop(what, None)) is not None:
            self.ready.append(rank)

    def _waiting(self) -> tuple[int, ...]:
        changes: list[list[tuple[float, int]]] = [[] for _ in self.schedule.ranks]
        done: dict[tuple[int, bool], dict[int, float]] = defaultdict(dict)  # when each stage was, by micro-batch
        for what, end in self.times.items():
            if isinstance(what, Done):
                done[what.microbatch, what.gradient][what.stage] = end
        for what, there in self.times.items():
            if isinstance(what, Message):
                value, microbatch, gradient, _, target = what
                edge, ends = self.flow.by_value[value], done[microbatch, gradient]
                users = (edge.source,) if gradient else self.flow.users[value][target]
                used = ends[users[0]] if len(users) == 1 else max([ends[user] for user in users])
                changes[target] += ((there, edge.size), (used, -edge.size))
        return tuple(
            max(accumulate((change for _, change in sorted(rank)), initial=0)) for rank in changes
        )  # sorted: at one time, what goes goes first

    def _stand(self) -> str:
        waits = []
        for rank, actions in enumerate(self.schedule.ranks):
            if self.position[rank] < len(actions):
                action = actions[self.position[rank]]
                missing = (
                    [need for need in self.flow.needs(action) if need not in self.times]
                    if action.kind in COMPUTE
                    else [self.flow.message(action)]
                )
                waits.append(f"rank {rank} at {action} (action {self.position[rank]}) waits for {missing[0]}")
        return f"{self.schedule.name} comes to a stand: {'; '.join(waits)}"


def trace_memory(result: Result, graph: StageGraph, rank: int) -> tuple[tuple[float, int], ...]:
    """Return the changes of the bytes of activations that `rank` keeps, as (seconds, bytes after the change)."""
    held, changes = 0, [(0.0, 0)]
    for event in result.timeline:
        if event.rank == rank and event.action.kind in COMPUTE:
            before, held = held, held + _count_kept_bytes(event.action, graph)
            if held != before:
                changes.append((event.start if held > before else event.end, held))
    return tuple(changes)


def compute_peak_memory(schedule: Schedule, graph: StageGraph) -> tuple[int, ...]:
    """Return for each rank the most bytes of activations that it keeps for backward: its order alone decides that.

    What a stage keeps of a micro-batch it keeps until the weight gradient, or the full backward, is done.
    """
    return tuple(
        max(accumulate((_count_kept_bytes(action, graph) for action in actions), initial=0))
        for actions in schedule.ranks
    )


def _count_kept_bytes(action: Action, graph: StageGraph) -> int:
    if action.kind is ActionKind.FORWARD:
        return graph.stages[action.stage].activation
    return -graph.stages[action.stage].activation if action.kind in LAST else 0
