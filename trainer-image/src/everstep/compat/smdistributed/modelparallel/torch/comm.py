"""Python objects between processes. All of it waits for the other side; objects travel pickled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from everstep.compat.smdistributed.modelparallel.torch.state import state


class CommGroup(Enum):
    """A group of processes that an object is for."""

    WORLD = "WORLD"
    MP_GROUP = "MP"
    DP_GROUP = "DP"
    PP_GROUP = "PP"
    TP_GROUP = "TP"
    RDP_GROUP = "RDP"


class RankType(Enum):
    """A group in which a rank counts."""

    WORLD_RANK = "WORLD"
    MP_RANK = "MP"
    DP_RANK = "DP"
    PP_RANK = "PP"
    TP_RANK = "TP"
    RDP_RANK = "RDP"


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Send an object to all others of the group, each of which calls recv_from."""
    for member in state().members[group.value]:
        if member != state().rank:
            _send(obj, member)


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Send an object to one process, which calls recv_from."""
    _send(obj, state().members[rank_type.value][dest_rank])


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Return the object that a process sends."""
    found = [None]
    dist.recv_object_list(found, src=state().members[rank_type.value][src_rank])
    return unpacked(found[0])


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Return the objects of all of the group, by rank in it."""
    found: list[Any] = [None] * len(state().members[group.value])
    dist.all_gather_object(found, packed(obj), group=state().groups[group.value])
    return [unpacked(each) for each in found]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait until all of the group are here."""
    dist.barrier(group=state().groups[group.value])


def mp_barrier() -> None:
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    barrier(CommGroup.DP_GROUP)


def _send(obj: Any, to: int) -> None:
    dist.send_object_list([packed(obj)], dst=to)


@dataclass
class _OfDevice:
    """A stand-in for a tensor on a GPU, whose number may be that of no GPU where it is received."""

    tensor: Any


def packed(obj: Any) -> Any:
    """Return an object as it travels: tensors on a GPU by way of the processor."""
    return pytree.tree_map(lambda leaf: _OfDevice(leaf.cpu()) if _on_gpu(leaf) else leaf, obj)


def unpacked(obj: Any) -> Any:
    """Return what was `packed`, with those tensors on this process's GPU."""
    return pytree.tree_map(lambda leaf: leaf.tensor.cuda() if isinstance(leaf, _OfDevice) else leaf, obj)


def _on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda
