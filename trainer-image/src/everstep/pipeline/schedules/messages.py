"""Check that a schedule sends what is needed, once, in time, and that both ends of each pair of ranks say the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from everstep.pipeline.schedules.actions import COMPUTE, Action, ActionKind, Schedule
from everstep.pipeline.schedules.checks import ScheduleViolation
from everstep.pipeline.schedules.flow import GRADIENTS, LAST, Done, Flow, Message

Ends = Mapping[tuple[int, int], Sequence[tuple[int, int, Action]]]  # by directed pair: rank, position, action


def check_messages(schedule: Schedule, flow: Flow) -> ScheduleViolation | None:
    """Check the messages of a schedule whose computations are right; None if they are right too."""
    for rank in range(len(schedule.ranks)):
        wrong = _Rank(schedule, flow, rank).check()
        if wrong is not None:
            return wrong
    reduced = [action.stage for actions in schedule.ranks for action in actions if action.kind is ActionKind.REDUCE]
    if reduced and len(reduced) != schedule.stages:
        missing = min(set(range(schedule.stages)) - set(reduced))
        return ScheduleViolation(
            f"{Action(ActionKind.REDUCE, missing)} is missing: all stages are reduced, or none", flow.placement[missing]
        )
    return _check_order(
        list_message_ends(schedule, flow, ActionKind.SEND), list_message_ends(schedule, flow, ActionKind.RECEIVE)
    )


def list_message_ends(schedule: Schedule, flow: Flow, kind: ActionKind) -> Ends:
    """The sends, or the receives, of each directed pair of ranks, in order."""
    found: dict[tuple[int, int], list[tuple[int, int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if action.kind is kind:
                message = flow.message(action)
                found[message.source, message.target].append((rank, position, action))
    return found


def _check_order(sends: Ends, receives: Ends) -> ScheduleViolation | None:
    for pair in sorted({*sends, *receives}):
        # What is needed is sent once and received once: so both are equally long.
        for count, (send, receive) in enumerate(zip(sends[pair], receives[pair], strict=True)):
            there = send[2]
            mirrored = Action(
                ActionKind.RECEIVE, there.peer, there.microbatch, there.stage, there.value, there.gradient
            )
            if receive[2] != mirrored:
                return ScheduleViolation(
                    f"message {count} from rank {pair[0]} to rank {pair[1]} is sent as {there} (action {send[1]}), "
                    f"but received as {receive[2]}",
                    receive[0],
                    receive[1],
                )
    return None


class _Rank:
    """One walk over the list of a rank."""

    def __init__(self, schedule: Schedule, flow: Flow, rank: int) -> None:
        self.schedule, self.flow, self.rank = schedule, flow, rank
        self.done: set[Done] = set()
        self.due: set[Message] = set()  # may be sent
        self.sent: set[Message] = set()
        self.received: dict[Message, int] = {}
        self.used: set[Message] = set()
        self.finished: dict[int, int] = defaultdict(int)  # micro-batches by stage
        self.reduced: set[int] = set()
        self.reduces = any(action.kind is ActionKind.REDUCE for action in schedule.ranks[rank])
        self.ties = {
            name: [stage for stage in owners if flow.placement[stage] == rank] for name, owners in flow.graph.ties
        }
        self.tied: set[str] = set()

    def check(self) -> ScheduleViolation | None:
        for position, action in enumerate(self.schedule.ranks[self.rank]):
            if (why := self._check(position, action)) is not None:
                return ScheduleViolation(f"{action}: {why}", self.rank, position)
        for message in sorted(self.due - self.sent):
            return ScheduleViolation(f"the {message} is never sent", self.rank)
        for message, position in self.received.items():
            if message not in self.used:
                return ScheduleViolation(f"no stage of this rank uses the {message}", self.rank, position)
        for name, owners in self.ties.items():
            if owners and name not in self.tied:
                return ScheduleViolation(f"{Action(ActionKind.TIE, owners[0], value=name)} is missing", self.rank)
        return None

    def _check(self, position: int, action: Action) -> str | None:
        if action.kind in COMPUTE:
            return self._check_compute(action)
        if action.kind is ActionKind.REDUCE:
            twice = action.stage in self.reduced
            self.reduced.add(action.stage)
            return "is there twice" if twice else self._check_last([action.stage])
        if action.kind is ActionKind.TIE:
            return self._check_tie(action)
        if (why := self._check_names(action)) is not None:
            return why
        message = self.flow.message(action)
        known: set[Message] | dict[Message, int] = self.sent if action.kind is ActionKind.SEND else self.received
        if message in known:
            return "is there twice"
        if action.kind is ActionKind.RECEIVE:
            self.received[message] = position
            return None
        self.sent.add(message)
        return None if message in self.due else "is sent before it is there"

    def _check_compute(self, action: Action) -> str | None:
        for need in self.flow.needs(action):
            if isinstance(need, Message):
                if need not in self.received:
                    hint = "" if self.schedule.lowered else " (lower_schedule() adds what is sent)"
                    return f"uses the {need}, which was not received{hint}"
                self.used.add(need)
        if action.kind is not ActionKind.WEIGHT_GRAD:
            self.done.add(Done(action.stage, action.microbatch, action.kind in GRADIENTS))
        if action.kind in LAST:
            self.finished[action.stage] += 1
        self.due.update(self.flow.gives(action, self.done))
        return None

    def _check_names(self, action: Action) -> str | None:
        edge = self.flow.by_value.get(action.value)
        if edge is None:
            return f"there is no value {action.value!r} that leaves its stage"
        gives_value = (action.kind is ActionKind.SEND) != action.gradient
        source, user = (action.stage, action.peer) if gives_value else (action.peer, action.stage)
        if source != edge.source or user not in edge.targets or (action.gradient and not edge.gradient):
            what = "a value without gradient, " if not edge.gradient else ""
            return f"{action.value!r} is {what}of stage {edge.source}, used by {', '.join(map(str, edge.targets))}"
        if self.flow.placement[action.peer] == self.rank:
            return f"stages {action.stage} and {action.peer} are on the same rank"
        if not 0 <= action.microbatch < self.schedule.microbatches:
            return f"there are {self.schedule.microbatches} micro-batches"
        return None

    def _check_tie(self, action: Action) -> str | None:
        owners = self.ties.get(action.value)
        if not owners or action.stage != owners[0]:
            return f"stage {action.stage} is not the lowest here that owns {action.value!r}"
        if action.value in self.tied:
            return "is there twice"
        self.tied.add(action.value)
        if self.reduces and not self.reduced.issuperset(owners):
            return "comes before the reduction of its owners"
        return self._check_last(owners)

    def _check_last(self, stages: Sequence[int]) -> str | None:
        for stage in stages:
            if self.finished[stage] < self.schedule.microbatches:
                return f"comes before the last weight gradient of stage {stage}"
        return None
