"""List what each computation needs and gives, once it is known which stage is on which rank.

A value that stages of another rank use goes there once; its gradient comes back from there once, when the last of them
has given its share. What stays on a rank is not sent.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Edge, StageGraph
from everstep.pipeline.schedules.actions import Action, ActionKind

GRADIENTS = frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRAD})  # what gives the gradients of a stage's inputs
LAST = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD})  # what a stage does last with a micro-batch
_new: Any = tuple.__new__  # a named tuple, in half of the time of its own class; a step of a large graph has millions


class Done(NamedTuple):
    """A computation of this rank: the forward of `stage`, or what gives the gradients of its inputs."""

    stage: int
    microbatch: int
    gradient: bool


class Message(NamedTuple):
    """A value, or its gradient, on its way from rank `source` to rank `target`."""

    value: str
    microbatch: int
    gradient: bool
    source: int
    target: int

    def __str__(self) -> str:
        what = "gradient of " if self.gradient else ""
        return f"{what}{self.value!r} of micro-batch {self.microbatch} from rank {self.source} to rank {self.target}"


@dataclass(frozen=True)
class Flow:
    """PipelineError if the placement is not of as many stages as the graph."""

    graph: StageGraph
    placement: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.placement) != len(self.graph.stages):
            raise PipelineError(
                f"the schedule is for {len(self.placement)} stages, the model has {len(self.graph.stages)}"
            )

    @cached_property
    def by_value(self) -> dict[str, Edge]:
        return {edge.value: edge for edge in self.graph.edges}

    @cached_property
    def inputs(self) -> tuple[tuple[Edge, ...], ...]:
        """The edges that each stage uses."""
        return tuple(
            tuple(edge for edge in self.graph.edges if stage in edge.targets) for stage in range(len(self.placement))
        )

    @cached_property
    def outputs(self) -> tuple[tuple[Edge, ...], ...]:
        """The edges that each stage gives."""
        return tuple(
            tuple(edge for edge in self.graph.edges if stage == edge.source) for stage in range(len(self.placement))
        )

    @cached_property
    def users(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """Return for each value the stages that use it, by their rank."""
        found: dict[str, dict[int, tuple[int, ...]]] = {}
        for edge in self.graph.edges:
            ranks = found.setdefault(edge.value, {})
            for stage in edge.targets:
                ranks[self.placement[stage]] = (*ranks.get(self.placement[stage], ()), stage)
        return found

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The directed pairs of ranks between which something is sent, values and gradients; ascending."""
        found = set[tuple[int, int]]()
        for edge in self.graph.edges:
            source = self.placement[edge.source]
            for at in self.users[edge.value].keys() - {source}:
                found.add((source, at))
                if edge.gradient:
                    found.add((at, source))
        return tuple(sorted(found))

    @property
    def crosses(self) -> bool:
        """Tell whether any value moves from one rank to another."""
        return any(self.users[edge.value].keys() != {self.placement[edge.source]} for edge in self.graph.edges)

    def message(self, action: Action) -> Message:
        """Return the message that a SEND or a RECEIVE is about."""
        here, there = self.placement[action.stage], self.placement[action.peer]
        source, target = (here, there) if action.kind is ActionKind.SEND else (there, here)
        return Message(action.value, action.microbatch, action.gradient, source, target)

    @cached_property
    def _forward(self) -> list[list[tuple[str, int, int]]]:
        return [[(e.value, e.source, self.placement[e.source]) for e in inputs] for inputs in self.inputs]

    @cached_property
    def _backward(self) -> list[list[tuple[str, int, tuple[int, ...]]]]:
        """Return for each stage the gradients that it needs: the value, the rank that gives it, and that rank's stages
        that use it."""
        return [
            [(e.value, at, users) for e in outputs if e.gradient for at, users in self.users[e.value].items()]
            for outputs in self.outputs
        ]

    @cached_property
    def _sent(self) -> list[list[tuple[str, int]]]:
        """Return for each stage the values that it sends to other ranks, and the rank of each."""
        return [
            [(e.value, at) for e in outputs for at in self.users[e.value] if at != self.placement[stage]]
            for stage, outputs in enumerate(self.outputs)
        ]

    @cached_property
    def _returned(self) -> list[list[tuple[str, int, tuple[int, ...]]]]:
        """Return for each stage the values whose gradients go to another rank: the value, the rank, and all stages here
        that use it."""
        return [
            [
                (e.value, self.placement[e.source], self.users[e.value][self.placement[stage]])
                for e in inputs
                if e.gradient and self.placement[e.source] != self.placement[stage]
            ]
            for stage, inputs in enumerate(self.inputs)
        ]

    def needs(self, action: Action) -> list[Done | Message]:
        """Return what must be there before a computation starts."""
        stage, microbatch = action.stage, action.microbatch
        rank = self.placement[stage]
        if action.kind is ActionKind.FORWARD:
            return [
                Done(source, microbatch, False) if at == rank else _new(Message, (value, microbatch, False, at, rank))
                for value, source, at in self._forward[stage]
            ]
        if action.kind is ActionKind.WEIGHT_GRAD:
            return [Done(stage, microbatch, True)]
        needed: list[Done | Message] = [Done(stage, microbatch, False)]
        for value, at, users in self._backward[stage]:
            if at == rank:
                needed += [Done(user, microbatch, True) for user in users]
            else:
                needed.append(_new(Message, (value, microbatch, True, at, rank)))
        return needed

    def gives(self, action: Action, done: Container[Done | Message]) -> list[Message]:
        """Return the messages that may be sent once a computation is done; `done` is what this rank has computed, with
        this."""
        stage, microbatch = action.stage, action.microbatch
        rank = self.placement[stage]
        if action.kind is ActionKind.FORWARD:
            return [_new(Message, (value, microbatch, False, rank, at)) for value, at in self._sent[stage]]
        if action.kind is ActionKind.WEIGHT_GRAD:
            return []
        return [
            _new(Message, (value, microbatch, True, rank, at))
            for value, at, users in self._returned[stage]
            if users == (stage,) or all(Done(user, microbatch, True) in done for user in users)
        ]
