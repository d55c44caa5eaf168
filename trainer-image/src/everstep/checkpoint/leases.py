"""A reader says which checkpoint it reads, for a while; retention leaves that one alone.

A lease is a courtesy and never what makes a read right: every chunk is verified as it is read.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everstep.checkpoint.errors import Missing
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
