"""A reader says which checkpoint it reads, for a while; retention leaves that one alone.

A lease is a courtesy and never what makes a read right: every chunk is verified as it is read.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from everstep.checkpoint.catalog.candidates import is_committed
from everstep.checkpoint.errors import CheckpointError, Missing, Removed, StoreError, is_damage
from everstep.checkpoint.format.keys import LEASES, Attempt, Key
from everstep.checkpoint.store.base import Store, StoredObject

SECONDS = 900.0

_OUR_NAME = re.compile(re.escape(LEASES) + r"[0-9a-f]{16}\.json", re.ASCII)  # in a folder that others may use too


class CheckpointLease:
    """One reader's claim on `key`; `renew` it before it has `expired` or expect to fall back.

    How long it is good is counted from when the store says that it was written: the clocks of who reads and of who
    removes may differ by hours.
    """

    def __init__(
        self, store: Store, key: Key, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._seconds, self._clock = store, seconds, clock
        self._name = _make_name()
        self._until = 0.0
        self.key = key
        self.renew()

    def renew(self) -> None:
        """Hold it for `seconds` from now."""
        until = self._clock() + self._seconds
        fields = {
            "attempt": str(self.key.attempt),
            "step": self.key.step,
            "seconds": self._seconds,
            "expires": time.time() + self._seconds,  # for libraries that know no `seconds`
        }
        self._store.replace(self._name, json.dumps(fields).encode())
        self._until = until

    @property
    def seconds_left(self) -> float:
        return self._until - self._clock()

    @property
    def expired(self) -> bool:
        return self.seconds_left <= 0

    def release(self) -> None:
        self._store.delete([self._name])


class ReadLease:
    """A lease where the store may be written; who may not write reads all the same. Any thread may renew it."""

    def __init__(self, store: Store, key: Key) -> None:
        self._lock = threading.Lock()
        self._lease: CheckpointLease | None = None
        with suppress(StoreError):
            self._lease = CheckpointLease(store, key)

    def renew(self) -> None:
        """Hold it for longer, when half of its time is over: for every chunk that is read."""
        if self._lease is None or self._lease.seconds_left > SECONDS / 2:
            return
        with self._lock, suppress(StoreError):
            if self._lease.seconds_left <= SECONDS / 2:
                self._lease.renew()

    def release(self) -> None:
        """Let it go; where that fails it expires by itself."""
        if self._lease is not None:
            with suppress(StoreError):
                self._lease.release()


@contextmanager
def hold_read_lease(store: Store, key: Key) -> Iterator[ReadLease]:
    """Hold a checkpoint while it is read, so that retention leaves it alone. Take it before its index is read.

    Args:
        store: Where it is; it may be one that can only be read.
        key: Which one.

    Raises:
        Removed: Instead of what the block raised about damage, where the checkpoint is not there any more.
    """
    held = ReadLease(store, key)
    try:
        with telling_removed(store, key):
            yield held
    finally:
        held.release()


@contextmanager
def telling_removed(store: Store, key: Key) -> Iterator[None]:
    """Tell what was removed from what is damaged.

    Raises:
        Removed: Instead of what the block raised about damage, where the checkpoint is not there any more.
    """
    try:
        yield
    except CheckpointError as error:
        if is_damage(error) and not is_committed(store, key):
            raise Removed(key.manifest_name) from error
        raise


def list_lease_objects(store: Store) -> Iterator[StoredObject]:
    """Yield the objects of all leases, dead or alive, readable or not; others are somebody else's."""
    return (entry for entry in store.list(LEASES) if _OUR_NAME.fullmatch(entry.name))


def list_leases(store: Store) -> dict[str, tuple[Key, float]]:
    """Return of each lease's name what it holds, and until when, in seconds since 1970 by the store's clock: see
    find_time(). Unreadable ones are left out."""
    found = {}
    for entry in list_lease_objects(store):
        try:
            fields = json.loads(store.read(entry.name))
            key = Key(Attempt.parse(fields["attempt"]), fields["step"])
            until, seconds = float(fields["expires"]), float(fields.get("seconds", SECONDS))
        except (Missing, ValueError, KeyError, TypeError):
            continue
        found[entry.name] = (key, entry.modified + seconds if math.isfinite(entry.modified) else until)
    return found


def find_time(store: Store) -> float:
    """Return what time it is by the store's own clock, in seconds since 1970, from an object that is written for it.

    What is in a store was dated by that clock. Ours may be hours away from it, and what we take for old may be what
    somebody writes or reads at this moment. A store that may not be written to, or dates nothing, has our time.
    """
    name = _make_name()  # unreadable as a lease; the next prune removes what is left of it
    found = math.inf
    with suppress(StoreError):
        store.replace(name, b"{}")
        found = next((entry.modified for entry in store.list(name)), math.inf)
        store.delete([name])
    return found if math.isfinite(found) else time.time()


def _make_name() -> str:
    return f"{LEASES}{secrets.token_hex(8)}.json"
