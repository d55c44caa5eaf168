"""Ways to start the ranks of a job: directly (torch, none), or through an MPI launcher of the user's image.

Supported MPIs: Open MPI 4 and 5, MPICH and Intel MPI (Hydra). Nothing here knows of leaders, links or restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from everstep.agent.ranks.events import GenerationLayout


@dataclass(frozen=True)
class RankPlacement:
    """One rank on this node."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


class Launcher(Protocol):
    """A way to start ranks without a program in between."""

    def place_ranks(self, layout: GenerationLayout) -> Sequence[RankPlacement]: ...

    def make_variables(self, layout: GenerationLayout) -> dict[str, str]: ...


def count_ranks_on_node(distribution: str, procs_per_node: int) -> int:
    """Return how many ranks the agent sees on each node: with `none` the command is its own launcher, once per node."""
    return 1 if distribution == "none" else procs_per_node
