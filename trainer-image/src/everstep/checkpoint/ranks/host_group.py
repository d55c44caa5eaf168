"""A process group of all ranks on the processor, for the few collectives of a session or an adapter, and its end.

A group holds descriptors and threads of gloo until it is destroyed: whoever opens one keeps it for its own life and
closes it, and nobody opens one for each save.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from typing import cast

import torch.distributed as dist

from everstep.checkpoint.ranks.arrivals import Arrivals
from everstep.checkpoint.ranks.collectives import name_lost_ranks
from everstep.checkpoint.ranks.kv_store import KVStore, LocalKVStore, SharedKVStore

_opened = itertools.count()  # groups that this process has opened: all ranks count alike


def open_host_group(timeout_seconds: float, call: str) -> dist.ProcessGroup | None:
    """Open a gloo group of all ranks, whatever training uses. Collective.

    Args:
        timeout_seconds: How long a rank waits for the others in each collective.
        call: What the script calls, for the message.

    Returns:
        The group; None for a single process.

    Raises:
        RankLost: With the ranks that did not come.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    timeout = datetime.timedelta(seconds=timeout_seconds)
    board = _open_board(timeout_seconds)
    with Arrivals(board, dist.get_rank(), None).naming_absent(call), name_lost_ranks():
        return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))


def _open_board(timeout_seconds: float) -> KVStore:
    """Return what ranks may talk through before they have a group: the store by which torch has made them meet."""
    store = dist.distributed_c10d._get_default_store()
    if store is None:  # MPI needs none, and then nobody is named
        return LocalKVStore()
    return SharedKVStore(store, f"everstep.host_group/{next(_opened)}", dist.get_world_size(), timeout_seconds)


def close_host_group(group: dist.ProcessGroup | None) -> None:
    """Give back the descriptors and threads of a group that open_host_group() gave. Not collective.

    Args:
        group: The group; None, and one that has gone with the group of all ranks, is fine.
    """
    if group is None or not (dist.is_available() and dist.is_initialized()):
        return
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        dist.destroy_process_group(group)
