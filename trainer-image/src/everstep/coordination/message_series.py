"""Numbered messages of rank 0 to all ranks, which go once nobody needs them any more."""

from __future__ import annotations

from collections import deque
from typing import Any

from everstep.coordination.kv_store import KVStore

_BLOCK = 16  # messages that are removed at a time


class MessageSeries:
    """Messages of one kind in the store, by ascending numbers.

    Ranks say block by block that they are beyond it, and rank 0 removes what all are beyond. Nobody waits for that, and
    what stays is a few blocks at most, however long the run is.

    Args:
        store: Where they are.
        kind: The first part of their names.
        leads: Whether this is rank 0.
    """

    def __init__(self, store: KVStore, kind: str, leads: bool) -> None:
        self._store = store
        self._kind = kind
        self._leads = leads
        self._blocks = 0  # that this rank is beyond
        self._kept: deque[int] = deque()  # of these, rank 0: blocks that are in the store still

    def get_name(self, number: int) -> str:
        """Return the name of a message in the store."""
        return f"{self._kind}/{number}"

    def leave(self, number: int, message: Any) -> None:
        """Leave a message, on rank 0."""
        self._store.leave(self.get_name(number), message)

    def read(self, number: int, timeout_seconds: float = 0.0) -> Any:
        """Return the message, or None where there is none within this time."""
        return self._store.read(self.get_name(number), timeout_seconds)

    def mark_read(self, number: int) -> None:
        """Say that this rank needs neither this message nor any before it."""
        blocks = (number + 1) // _BLOCK
        if blocks <= self._blocks:
            return
        for block in range(self._blocks, blocks):
            if self._leads:
                self._kept.append(block)
            else:
                self._store.count(f"over/{self._kind}/{block}", 1)
        self._blocks = blocks
        while self._kept and self._store.count(f"over/{self._kind}/{self._kept[0]}") == self._store.ranks - 1:
            over = self._kept.popleft()
            for each in range(over * _BLOCK, (over + 1) * _BLOCK):
                self._store.remove(self.get_name(each))
            self._store.remove(f"over/{self._kind}/{over}")
