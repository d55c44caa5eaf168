"""Tell whether all ranks come to their end, by going as far as any of them can.

Which receive a send meets is fixed by their order, and nothing that a rank does takes from another what it waits for.
So the order of trying does not matter: where no rank can go on, no order of events would have helped.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from everstep.pipeline.schedules.actions import ActionKind, Schedule
from everstep.pipeline.schedules.checks import ScheduleViolation
from everstep.pipeline.schedules.flow import Flow
from everstep.pipeline.schedules.messages import list_message_ends


@dataclass(frozen=True)
class Buffered:
    """A send never waits; a receive waits until its message was sent."""


@dataclass(frozen=True)
class Rendezvous:
    """A send waits until its receive is posted: when the receiver stands at it, or when fewer than `ahead` of the
    receives that it has not passed are before it. A receive waits until its message was sent."""

    ahead: int = 0


Semantics = Buffered | Rendezvous


def find_deadlock(schedule: Schedule, flow: Flow, semantics: Semantics) -> ScheduleViolation | None:
    """Find the deadlock of a schedule whose messages are right; None if there is none.

    Right messages: the k-th send of a directed pair of ranks meets the k-th receive.
    """
    return _Ranks(schedule, flow, semantics).run()


class _Ranks:
    def __init__(self, schedule: Schedule, flow: Flow, semantics: Semantics) -> None:
        self.schedule, self.flow, self.semantics = schedule, flow, semantics
        self.position = [0] * len(schedule.ranks)
        self.passed = [0] * len(schedule.ranks)  # receives
        self.sent: dict[tuple[int, int], int] = defaultdict(int)
        self.taken: dict[tuple[int, int], int] = defaultdict(int)
        self.receives = list_message_ends(schedule, flow, ActionKind.RECEIVE)
        positions = [[p for p, a in enumerate(actions) if a.kind is ActionKind.RECEIVE] for actions in schedule.ranks]
        self.ordinal = [{position: count for count, position in enumerate(rank)} for rank in positions]
        self.tied: dict[str, set[int]] = defaultdict(set)
        self.owners = {name: {flow.placement[stage] for stage in owners} for name, owners in flow.graph.ties}

    def run(self) -> ScheduleViolation | None:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.position)):
                while self._unfinished(rank) and self._waits_for(rank) is None:
                    self._pass(rank)
                    moved = True
        stuck = [rank for rank in range(len(self.position)) if self._unfinished(rank)]
        return self._cycle(stuck[0]) if stuck else None

    def _unfinished(self, rank: int) -> bool:
        return self.position[rank] < len(self.schedule.ranks[rank])

    def _waits_for(self, rank: int) -> int | None:
        action = self.schedule.ranks[rank][self.position[rank]]
        if action.kind is ActionKind.TIE:
            self.tied[action.value].add(rank)
            return min(self.owners[action.value] - self.tied[action.value], default=None)
        if action.kind not in (ActionKind.SEND, ActionKind.RECEIVE):
            return None
        message = self.flow.message(action)
        pair = message.source, message.target
        if action.kind is ActionKind.RECEIVE:
            return None if self.sent[pair] > self.taken[pair] else message.source
        if isinstance(self.semantics, Buffered):
            return None
        _, at, _ = self.receives[pair][self.sent[pair]]
        ahead = self.ordinal[message.target][at] - self.passed[message.target] < self.semantics.ahead
        return None if ahead or self.position[message.target] == at else message.target

    def _pass(self, rank: int) -> None:
        action = self.schedule.ranks[rank][self.position[rank]]
        self.position[rank] += 1
        if action.kind in (ActionKind.SEND, ActionKind.RECEIVE):
            message = self.flow.message(action)
            if action.kind is ActionKind.SEND:
                self.sent[message.source, message.target] += 1
            else:
                self.taken[message.source, message.target] += 1
                self.passed[rank] += 1

    def _cycle(self, rank: int) -> ScheduleViolation:
        path: list[int] = []
        while rank not in path:
            path.append(rank)
            other = self._waits_for(rank)
            assert other is not None  # it stands still, and a rank that has finished owes nothing
            rank = other
        path = path[path.index(rank) :]
        waits = []
        for here, there in zip(path, (*path[1:], path[0]), strict=True):
            action = self.schedule.ranks[here][self.position[here]]
            what = {ActionKind.SEND: "post the receive of", ActionKind.RECEIVE: "send", ActionKind.TIE: "come to"}[
                action.kind
            ]
            waits.append(f"rank {here} waits at action {self.position[here]} for rank {there} to {what} {action}")
        return ScheduleViolation(f"deadlock ({self.semantics})", path[0], self.position[path[0]], tuple(waits))
