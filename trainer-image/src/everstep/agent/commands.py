"""What the leader wants done. Carried out by leading.py; plain values, so that tests can read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from .events import Layout
from .protocol import Outcome


@dataclass(frozen=True)
class Dial:
    """Keep dialling `address` until a link to node `index` stands or another Dial comes. Empty: stop dialling."""

    index: int
    address: str


@dataclass(frozen=True)
class Hangup:
    index: int


@dataclass(frozen=True)
class Start:
    """To every node: `layout`, with the node's own index in it."""

    layout: Layout


@dataclass(frozen=True)
class StopRanks:
    indexes: tuple[int, ...]
    generation: int
    grace: float


@dataclass(frozen=True)
class End:
    """To every joined node: leave. The last command."""

    outcome: Outcome


Command = Union[Dial, Hangup, Start, StopRanks, End]
