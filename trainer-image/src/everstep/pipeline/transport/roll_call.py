"""Find out which ranks are missing before there are heartbeats, by the store of the default process group.

Gloo says of a rank that never came only that a wait has ended, and of one that died while groups are made only an
address. Each rank therefore leaves a mark in the store, and whoever waits looks for the marks of the others.
"""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_calls = itertools.count()


class RollCall:
    """One meeting of all processes; they make them in the same order."""

    def __init__(self) -> None:
        self._number = next(_calls)

    def find_missing(self, moment: str, seconds: float) -> list[int]:
        """Leave a mark of this rank, and wait for those of all others.

        Args:
            moment: What the mark says, the same on all ranks.
            seconds: How long to wait.

        Returns:
            The ranks whose mark was not there in time; none if the process group has no store.

        Raises:
            RuntimeError: The store cannot be reached.
        """
        store: Any = dist.distributed_c10d._get_default_store()
        if store is None:
            return []
        keys = [f"everstep.pipeline/{self._number}/{moment}/{rank}" for rank in range(dist.get_world_size())]
        store.set(keys[dist.get_rank()], "1")
        until = time.monotonic() + seconds
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            if time.monotonic() < until - 0.1:
                raise  # no wait that has ended: the store is gone
            return [rank for rank, key in enumerate(keys) if not store.check([key])]
        return []
