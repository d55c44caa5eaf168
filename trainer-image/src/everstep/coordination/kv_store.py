"""Pass small messages between ranks without a collective: by torch's TCPStore, or by a dictionary for one process."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import time
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch.distributed as dist

from everstep.coordination import address
from everstep.coordination.bounded_calls import BoundedCalls, CallFailed
from everstep.coordination.errors import ErrorTypes
from everstep.coordination.group import RankGroup

_PIECE = 4 << 20  # bytes; a TCPStore hangs up on who brings it more than 8 MiB at once
_PACKED = b"z"  # no JSON begins like that
# Seconds between two looks for a message. Not TCPStore.wait(): torch prints two lines each time that one times out.
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.0001, 0.25, 1.3
STORE_PATIENCE = 300.0  # seconds
_LOOKS_AT_ONCE = 8  # without a pause


class KVStore(Protocol):
    """Messages by name; each is left once and stays until it is removed. Everything may raise KVStoreLost."""

    @property
    def ranks(self) -> int:
        """Return how many ranks share this store."""
        ...

    @property
    def errors(self) -> ErrorTypes:
        """Return the errors that are raised by this store, and by what is built on it."""
        ...

    def leave(self, name: str, message: Any) -> None:
        """Leave a message (anything that JSON can write, of any size)."""
        ...

    def read(self, name: str, timeout: float = 0.0) -> Any:
        """Return the message, waiting for it at most so many seconds; None if there is none by then."""
        ...

    def remove(self, name: str) -> None:
        """Remove this message, if it was ever left, or this counter: nobody will read it any more."""
        ...

    def count(self, name: str, more: int = 0) -> int:
        """Add to the counter of this name (zero at first), and return what it is then."""
        ...


class LocalKVStore:
    """The store of a run with one process."""

    ranks = 1
    errors = ErrorTypes()

    def __init__(self) -> None:
        self._messages: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def leave(self, name: str, message: Any) -> None:
        self._messages[name] = message

    def read(self, name: str, timeout: float = 0.0) -> Any:
        return self._messages.get(name)

    def remove(self, name: str) -> None:
        self._messages.pop(name, None)
        self._counts.pop(name, None)

    def count(self, name: str, more: int = 0) -> int:
        self._counts[name] = self._counts.get(name, 0) + more
        return self._counts[name]


class SharedKVStore:
    """The store of a run with several: a TCPStore that rank 0 hosts at a port of its own (see open()), or any other.

    Names begin with a secret that is told by one broadcast, since a TCPStore asks nobody who they are.

    Args:
        store: Where the messages are.
        secret: What names begin with.
        ranks: The number of ranks that share it.
        timeout_seconds: How long one call may take: a TCPStore whose host was stopped would never answer.
        errors: The errors that are raised.
    """

    def __init__(
        self,
        store: dist.Store,
        secret: str,
        ranks: int,
        timeout_seconds: float = STORE_PATIENCE,
        errors: ErrorTypes | None = None,
    ) -> None:
        self.ranks = ranks
        self.errors = errors or ErrorTypes()
        self._store = store
        self._secret = secret
        self._calls = BoundedCalls(timeout_seconds)

    @classmethod
    def open(cls, group: RankGroup, timeout_seconds: float) -> KVStore:
        """Open the store of a group: hosted by rank 0, or local where the group is one process. Collective.

        Args:
            group: All ranks of the run.
            timeout_seconds: How long it takes to connect, and then one call, at most.

        Raises:
            KVStoreLost: Rank 0 cannot be reached.
        """
        if group.size == 1:
            return LocalKVStore()
        limit = datetime.timedelta(seconds=timeout_seconds)
        given = os.environ.get("MASTER_ADDR") or ""
        told: tuple[str, str, int, str] = ("", "", 0, "")
        if group.rank == 0:
            store = dist.TCPStore(given or "localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
            told = (given or address.find_host_address(), socket.gethostname(), store.port, secrets.token_hex(16))
        host, machine, port, secret = group.broadcast(told)
        if group.rank != 0:
            if not given and machine == socket.gethostname():
                host = "localhost"  # it may have no network
            with _naming_lost_store(group.errors):
                store = BoundedCalls(timeout_seconds).run(
                    dist.TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=limit
                )
        return cls(store, secret, group.size, timeout_seconds, group.errors)

    def leave(self, name: str, message: Any) -> None:
        full, data = f"{self._secret}/{name}", json.dumps(message).encode()
        with _naming_lost_store(self.errors):
            if len(data) > _PIECE:
                packed = zlib.compress(data, 1)
                starts = range(0, len(packed), _PIECE)
                for i, start in enumerate(starts):
                    self._calls.run(self._store.set, f"{full}/{i}", packed[start : start + _PIECE])
                data = _PACKED + b"%d" % len(starts)  # last: who sees it finds the pieces
            self._calls.run(self._store.set, full, data)

    def read(self, name: str, timeout: float = 0.0) -> Any:
        full = f"{self._secret}/{name}"
        until, pause, looks = time.monotonic() + timeout, _FIRST_PAUSE, 0
        with _naming_lost_store(self.errors):
            while not self._calls.run(self._store.check, [full]):
                if (left := until - time.monotonic()) <= 0:
                    return None
                looks += 1
                if looks > _LOOKS_AT_ONCE:  # before, the answer may be on its way
                    time.sleep(min(pause, left))
                    pause = min(_GROWTH * pause, _LONGEST_PAUSE)
            return self._found(full)

    def remove(self, name: str) -> None:
        full = f"{self._secret}/{name}"
        with _naming_lost_store(self.errors):
            if self._calls.run(self._store.check, [full]):
                pieces = self._pieces(full, self._get(full))
                for each in (full, *pieces):
                    self._calls.run(self._store.delete_key, each)

    def count(self, name: str, more: int = 0) -> int:
        with _naming_lost_store(self.errors):
            return int(self._calls.run(self._store.add, f"{self._secret}/{name}", more))

    def _found(self, full: str) -> Any:
        data = self._get(full)
        pieces = self._pieces(full, data)
        return json.loads(zlib.decompress(b"".join(map(self._get, pieces))) if pieces else data)

    def _get(self, full: str) -> bytes:
        return bytes(self._calls.run(self._store.get, full))

    def _pieces(self, full: str, data: bytes) -> list[str]:
        """Return the keys of the message's pieces, if it was too large for one; else none."""
        return [f"{full}/{i}" for i in range(int(data[1:]))] if data.startswith(_PACKED) else []


@contextlib.contextmanager
def _naming_lost_store(errors: ErrorTypes) -> Iterator[None]:
    try:
        yield
    except CallFailed as error:
        raise errors.store_lost(
            f"rank 0, which decides for all, cannot be reached: {str(error).splitlines()[0]}"
        ) from error
