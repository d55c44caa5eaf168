"""The place of one rank on its node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlacement:
    """One rank on this node."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
