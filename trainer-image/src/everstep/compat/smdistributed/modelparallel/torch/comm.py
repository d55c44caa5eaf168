"""Python objects between processes. All of it waits for the other side; objects travel pickled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from everstep.compat.smdistributed.modelparallel.torch.state import current_state


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
    for member in current_state().members[group.value]:
        if member != current_state().rank:
            _send_object(obj, member)


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Send an object to one process, which calls recv_from."""
    _send_object(obj, current_state().members[rank_type.value][dest_rank])


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Return the object that a process sends."""
    found = [None]
    dist.recv_object_list(found, src=current_state().members[rank_type.value][src_rank])
    return unpack_object(found[0])


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Return the objects of all of the group, by rank in it."""
    found: list[Any] = [None] * len(current_state().members[group.value])
    dist.all_gather_object(found, pack_object(obj), group=current_state().groups[group.value])
    return [unpack_object(each) for each in found]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait until all of the group are here."""
    dist.barrier(group=current_state().groups[group.value])


def mp_barrier() -> None:
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    barrier(CommGroup.DP_GROUP)


def _send_object(obj: Any, to: int) -> None:
    dist.send_object_list([pack_object(obj)], dst=to)


@dataclass
class _CopiedTensor:
    """A stand-in for a tensor on a GPU, whose number may be that of no GPU where it is received."""

    tensor: Any


def pack_object(obj: Any) -> Any:
    """Return an object as it travels: tensors on a GPU by way of the processor."""
    return pytree.tree_map(lambda leaf: _CopiedTensor(leaf.cpu()) if _is_on_gpu(leaf) else leaf, obj)


def unpack_object(obj: Any) -> Any:
    """Return what `pack_object` packed, with those tensors on this process's GPU."""
    return pytree.tree_map(lambda leaf: leaf.tensor.cuda() if isinstance(leaf, _CopiedTensor) else leaf, obj)


def _is_on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda
