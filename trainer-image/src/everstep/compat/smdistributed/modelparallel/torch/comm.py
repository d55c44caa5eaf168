"""Python objects between processes. All of it waits for the other side; objects travel pickled."""

from __future__ import annotations

from enum import Enum
from typing import Any

from everstep.compat.smdistributed.modelparallel.torch.state import state


class CommGroup(Enum):
    """Which processes an object is for."""

    WORLD = "WORLD"
    MP_GROUP = "MP"
    DP_GROUP = "DP"
    PP_GROUP = "PP"
    TP_GROUP = "TP"
    RDP_GROUP = "RDP"


class RankType(Enum):
    """In which group a rank counts."""

    WORLD_RANK = "WORLD"
    MP_RANK = "MP"
    DP_RANK = "DP"
    PP_RANK = "PP"
    TP_RANK = "TP"
    RDP_RANK = "RDP"


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends to all others of the group, each of which calls recv_from."""
    for member in state().members[group.value]:
        if member != state().rank:
            _send(obj, member)


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends to one process, which calls recv_from."""
    _send(obj, state().members[rank_type.value][dest_rank])


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """What that process sends."""
    import torch.distributed as dist

    found = [None]
    dist.recv_object_list(found, src=state().members[rank_type.value][src_rank])
    return found[0]


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """The objects of all of the group, by rank in it."""
    import torch.distributed as dist

    found: list[Any] = [None] * len(state().members[group.value])
    dist.all_gather_object(found, obj, group=state().groups[group.value])
    return found


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits until all of the group are here."""
    import torch.distributed as dist

    dist.barrier(group=state().groups[group.value])


def mp_barrier() -> None:
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    barrier(CommGroup.DP_GROUP)


def _send(obj: Any, to: int) -> None:
    import torch.distributed as dist

    dist.send_object_list([obj], dst=to)
