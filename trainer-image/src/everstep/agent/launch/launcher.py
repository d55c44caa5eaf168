"""The interface of the launchers that need no program in between (torch, none)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from everstep.agent.ranks.placement import RankPlacement
from everstep.agent.wire.generation_layout import GenerationLayout


class Launcher(Protocol):
    """A way to start ranks without a program in between."""

    def place_ranks(self, layout: GenerationLayout) -> Sequence[RankPlacement]: ...

    def make_variables(self, layout: GenerationLayout, rank: int) -> dict[str, str]: ...


def count_ranks_on_node(distribution: str, procs_per_node: int) -> int:
    """Return how many ranks the agent sees on each node: with `none` the command is its own launcher, once per node."""
    return 1 if distribution == "none" else procs_per_node
