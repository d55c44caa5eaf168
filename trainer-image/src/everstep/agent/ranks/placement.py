"""The place of one rank on its node."""

from __future__ import annotations

from typing import NamedTuple


class RankPlacement(NamedTuple):
    """One rank on this node."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
