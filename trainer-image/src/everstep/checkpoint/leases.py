"""A reader says which checkpoint it reads, for a while; retention leaves that one alone.

A lease is a courtesy and never what makes a read right: every chunk is verified as it is read.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from everstep.checkpoint.candidates import is_committed
from everstep.checkpoint.errors import CheckpointError, Missing, Removed, StoreError, is_damage
from everstep.checkpoint.keys import LEASES, Attempt, Key
from everstep.checkpoint.store.base import Store

SECONDS = 900.0


class Lease:
    """One reader's claim on `key`; `renew` it before `expires` (seconds since 1970) or expect to fall back."""

    def __init__(
        self, store: Store, key: Key, seconds: float = SECONDS, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._seconds, self._clock = store, seconds, clock
        self._name = f"{LEASES}{secrets.token_hex(8)}.json"
        self.key = key
        self.expires = 0.0
        self.renew()

    def renew(self) -> None:
        """Hold it for `seconds` from now."""
        expires = self._clock() + self._seconds
        fields = {"attempt": str(self.key.attempt), "step": self.key.step, "expires": expires}
        self._store.replace(self._name, json.dumps(fields).encode())
        self.expires = expires

    @property
    def expired(self) -> bool:
        return self._clock() >= self.expires

    def release(self) -> None:
        self._store.delete([self._name])


@contextmanager
def lease(store: Store, key: Key, seconds: float = SECONDS) -> Iterator[Lease]:
    """Held while the block runs. Take it before the manifest is read: one that is still there then is left alone."""
    held = Lease(store, key, seconds)
    try:
        yield held
    finally:
        held.release()


class ReadLease:
    """A lease where the store may be written; who may not write reads all the same. Any thread may renew it."""

    def __init__(self, store: Store, key: Key) -> None:
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        with suppress(StoreError):
            self._lease = Lease(store, key)

    def renew(self) -> None:
        """Hold it for longer, when half of its time is over: for every chunk that is read."""
        if self._lease is None or self._lease.expires - time.time() > SECONDS / 2:
            return
        with self._lock, suppress(StoreError):
            if self._lease.expires - time.time() <= SECONDS / 2:
                self._lease.renew()

    def release(self) -> None:
        """Let it go; where that fails it expires by itself."""
        if self._lease is not None:
            with suppress(StoreError):
                self._lease.release()


@contextmanager
def reading(store: Store, key: Key) -> Iterator[ReadLease]:
    """Hold a checkpoint while it is read, so that retention leaves it alone. Take it before its index is read.

    Args:
        store: Where it is; it may be one that can only be read.
        key: Which one.

    Raises:
        Removed: Instead of what the block raised about damage, where the checkpoint is not there any more.
    """
    held = ReadLease(store, key)
    try:
        yield held
    except CheckpointError as error:
        if is_damage(error) and not is_committed(store, key):
            raise Removed(key.manifest_name) from error
        raise
    finally:
        held.release()


def leases(store: Store) -> dict[str, tuple[Key, float]]:
    """Of each lease's name: what it holds, and when it expires (seconds since 1970). Unreadable ones are left out."""
    found = {}
    for entry in store.list(LEASES):
        try:
            fields = json.loads(store.read(entry.name))
            key = Key(Attempt.parse(fields["attempt"]), fields["step"])
            found[entry.name] = (key, float(fields["expires"]))
        except (Missing, ValueError, KeyError, TypeError):
            continue
    return found
