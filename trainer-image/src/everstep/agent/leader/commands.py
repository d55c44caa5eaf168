"""Commands of the leader, which leader_server.py carries out; plain values, so that tests can read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from everstep.agent.wire.checkpoint_request import CheckpointRequest
from everstep.agent.wire.generation_layout import GenerationLayout
from everstep.agent.wire.protocol import Outcome


@dataclass(frozen=True)
class Dial:
    """A command to dial `address` until a link to node `index` stands or another Dial comes. Empty: stop dialling."""

    index: int
    address: str


@dataclass(frozen=True)
class HangUp:
    index: int


@dataclass(frozen=True)
class StartRanks:
    """A command to start ranks, for every node: `layout`, with the node's own index in it."""

    layout: GenerationLayout


@dataclass(frozen=True)
class StopRanks:
    indexes: tuple[int, ...]
    generation: int
    grace: float


@dataclass(frozen=True)
class AskForCheckpoint:
    """A command to have the ranks of a generation save at their next step boundary, for every node."""

    generation: int
    request: CheckpointRequest


@dataclass(frozen=True)
class DumpStacks:
    """A command to write the stacks of all ranks to the log, for every joined node."""


@dataclass(frozen=True)
class EndJob:
    """A command to leave, for every joined node. It is the last command."""

    outcome: Outcome


Command = Union[Dial, HangUp, StartRanks, StopRanks, AskForCheckpoint, DumpStacks, EndJob]
