"""The few collectives of a session, over its own gloo group; a broken connection is told as the rank it stands for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch.distributed as dist

from everstep.checkpoint.errors import RankLost

T = TypeVar("T")


def gather(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """What each rank gave, in their order; only ours without a group. RankLost."""
    if group is None:
        return [mine]
    found: list[T] = [mine] * dist.get_world_size()
    with _named():
        dist.all_gather_object(found, mine, group=group)
    return found


def tell(mine: T, group: dist.ProcessGroup | None) -> T:
    """What rank 0 gave. RankLost."""
    told = [mine]
    if group is not None:
        with _named():
            dist.broadcast_object_list(told, src=0, group=group)
    return told[0]


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost((), f"left, or did not come in time ({str(error).splitlines()[0]})") from error
