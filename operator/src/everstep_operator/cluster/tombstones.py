"""Tombstones of deleted objects, so that no late answer brings one back into the cache."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

# An answer is late by at most a request's timeout. A page of a list shows the state of its first page, and the API
# server compacts that away after 5 to 10 minutes. So a quarter of an hour outlives all that can still tell of it.
LIFETIME_SECONDS = 900.0
MAX_COUNT = 20_000  # about 6 MB: the pods of the largest job, deleted and replaced several times within the lifetime
NEVER_AGAIN = 1 << 64  # above every resourceVersion


class Tombstones:
    """UIDs of deleted objects, each with the resourceVersion at which it was gone; the oldest are dropped by age and by
    count.

    That an object is on no list is weaker news than its DELETED: lists may leave objects out (`comparison`). The next
    one that shows it is believed. A list from after a DELETED that shows the object all the same is believed too: the
    server's data were restored from a backup.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The version, when it was told, and whether only by a list.
        self._deleted: OrderedDict[str, tuple[int, float, bool]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deleted)

    def add(self, uid: str, version: int = NEVER_AGAIN, *, by_list: bool = False) -> None:
        """Note a deletion.

        Args:
            uid: UID of the object.
            version: States of the object that are older than this are of before its deletion. A later one is believed:
                a pod that has lost the label that the watch selects by is told as deleted, and may get it again.
            by_list: Whether nothing tells of it but a list on which the object is not.
        """
        now = self._clock()
        if uid:
            known, _, only = self._deleted.pop(uid, (0, now, True))
            self._deleted[uid] = (max(known, version), now, by_list and only)
        while self._deleted:
            oldest, (_, since, _) = next(iter(self._deleted.items()))
            if len(self._deleted) <= MAX_COUNT and now - since <= LIFETIME_SECONDS:
                return
            del self._deleted[oldest]

    def covers(self, uid: str, version: int, listed_at: int = 0) -> bool:
        """Tell whether a state of this object, at this resourceVersion, is of before its deletion.

        Args:
            uid: UID of the object.
            version: resourceVersion of the state.
            listed_at: That of the list which shows it; 0: none does.
        """
        gone_at, _, by_list = self._deleted.get(uid, (0, 0.0, False))
        return version < gone_at and listed_at < (gone_at - 1 if by_list else gone_at)

    def discard(self, uid: str) -> None:
        """Forget the deletion of an object that is there."""
        self._deleted.pop(uid, None)

    def clear(self) -> None:
        """Forget all deletions: the server's data were restored from a backup, and what was deleted may exist again."""
        self._deleted.clear()
