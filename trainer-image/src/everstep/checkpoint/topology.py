"""Which ranks there are and which of them share a node."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from everstep.checkpoint.collectives import gather
from everstep.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class Topology:
    """Nodes are counted in the order of their first ranks; `ranks` are those of this node in order."""

    rank: int
    world: int
    node: int
    nodes: int
    ranks: tuple[int, ...]

    @property
    def local(self) -> int:
        return self.ranks.index(self.rank)


def find(group: dist.ProcessGroup | None) -> Topology:
    """Collective over `group` (gloo; None for one process). A launcher's node rank counts, else the host's name."""
    if group is None:
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise CheckpointError("there are several ranks: call torch.distributed.init_process_group() first")
        return Topology(0, 1, 0, 1, (0,))
    rank, world = dist.get_rank(), dist.get_world_size()
    name = os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK") or socket.gethostname()
    names = gather(name, group)
    order = list(dict.fromkeys(names))
    ranks = tuple(other for other in range(world) if names[other] == name)
    return Topology(rank, world, order.index(name), len(order), ranks)
