"""A process group of all ranks on the processor, for the few collectives of a session or an adapter, and its end.

A group holds descriptors and threads of gloo until it is destroyed: whoever opens one keeps it for its own life and
closes it, and nobody opens one for each save.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import cast

import torch.distributed as dist


def open_host_group(timeout_seconds: float) -> dist.ProcessGroup | None:
    """Open a gloo group of all ranks, whatever training uses. Collective.

    Args:
        timeout_seconds: How long a rank waits for the others in each collective.

    Returns:
        The group; None for a single process.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    timeout = datetime.timedelta(seconds=timeout_seconds)
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))


def close_host_group(group: dist.ProcessGroup | None) -> None:
    """Give back the descriptors and threads of a group that open_host_group() gave. Not collective.

    Args:
        group: The group; None, and one that has gone with the group of all ranks, is fine.
    """
    if group is None or not (dist.is_available() and dist.is_initialized()):
        return
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        dist.destroy_process_group(group)
