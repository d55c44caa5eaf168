"""The few collectives of a session, over its own gloo group; a broken connection is told as the rank it stands for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from everstep.checkpoint.errors import RankLost

T = TypeVar("T")

_LOST = -1  # instead of a length: what follows are the ranks that were lost


def gather_objects(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the objects that all ranks passed, in the order of ranks; without a group, only that of this rank.

    Raises:
        RankLost: A rank is lost.
    """
    if group is None:
        return [mine]
    found: list[T] = [mine] * dist.get_world_size()
    with name_lost_ranks():
        dist.all_gather_object(found, mine, group=group)
    return found


def broadcast_from_first(mine: T, group: dist.ProcessGroup | None) -> T:
    """Return the object that rank 0 passed.

    Raises:
        RankLost: A rank is lost.
    """
    told = [mine]
    if group is not None:
        with name_lost_ranks():
            dist.broadcast_object_list(told, src=0, group=group)
    return told[0]


def gather_bytes(mine: bytes, group: dist.ProcessGroup | None) -> list[bytes] | None:
    """Return on rank 0 what each rank gave, in their order, and None on all others.

    Unlike gather_objects(), no rank but rank 0 holds what others gave, and nothing is padded. Rank 0 answers with
    scatter_bytes(); where a rank is lost, it tells all others there.

    Raises:
        RankLost: On rank 0, with the ranks that are gone.
    """
    if group is None:
        return [mine]
    if dist.get_rank() != 0:
        with name_lost_ranks():
            _send_bytes(mine, len(mine), 0, group)
        return None
    found, lost = [mine], []
    for rank in range(1, dist.get_world_size()):
        try:
            found.append(_receive_bytes(rank, group)[0])
        except RuntimeError:
            lost.append(rank)
    if lost:
        words = json.dumps(lost).encode()
        for rank in range(1, dist.get_world_size()):
            with contextlib.suppress(RuntimeError):
                if rank not in lost:
                    _send_bytes(words, _LOST - len(words), rank, group)
        raise RankLost(lost, "left, or did not come in time")
    return found


def scatter_bytes(messages: Sequence[bytes] | None, group: dist.ProcessGroup | None) -> bytes:
    """Return what rank 0 gave to this rank. `messages`: one for each rank, on rank 0; None on the others.

    Raises:
        RankLost: Rank 0 is gone, or says that others are.
    """
    if group is None:
        assert messages is not None
        return messages[0]
    if messages is None:
        with name_lost_ranks():
            answer, lost = _receive_bytes(0, group)
        if lost:
            raise RankLost(json.loads(answer), "left, or did not come in time")
        return answer
    lost_ranks = []
    for rank in range(1, dist.get_world_size()):
        try:
            _send_bytes(messages[rank], len(messages[rank]), rank, group)
        except RuntimeError:
            lost_ranks.append(rank)
    if lost_ranks:
        raise RankLost(lost_ranks, "left, or did not come in time")
    return messages[0]


def _send_bytes(data: bytes, length: int, rank: int, group: dist.ProcessGroup) -> None:
    dist.send(torch.tensor([length], device="cpu"), rank, group=group)
    if data:
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, group=group)


def _receive_bytes(rank: int, group: dist.ProcessGroup) -> tuple[bytes, bool]:
    """Return what that rank sent, and whether it is a list of lost ranks."""
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    dist.recv(length, rank, group=group)
    size = int(length)
    data = torch.empty(size if size >= 0 else _LOST - size, dtype=torch.uint8, device="cpu")
    if len(data):
        dist.recv(data, rank, group=group)
    return data.numpy().tobytes(), size < 0


@contextlib.contextmanager
def name_lost_ranks() -> Iterator[None]:
    """Tell a broken connection, or a rank that does not come, as what it stands for.

    Raises:
        RankLost: Without the rank, which torch does not say.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankLost((), f"left, or did not come in time ({str(error).splitlines()[0]})") from error
