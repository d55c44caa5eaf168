"""Pass small messages between ranks without a collective: by torch's TCPStore, or by a dictionary for one process."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
import time
import zlib
from typing import Any, Protocol

import torch.distributed as dist

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.ranks import address
from everstep.checkpoint.ranks.bounded_calls import BoundedCalls
from everstep.checkpoint.ranks.collectives import broadcast_from_first

_PIECE = 4 << 20  # bytes; a TCPStore hangs up on who brings it more than 8 MiB at once
_PACKED = b"z"  # no JSON begins like that
# Seconds between two looks for a message. Not TCPStore.wait(): torch prints two lines each time that one times out.
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.0001, 0.25, 1.3
_PATIENCE = 300.0  # seconds
_LOOKS_AT_ONCE = 8  # without a pause


class AgreementLost(CheckpointError):
    """Rank 0 cannot be reached, or has not decided in time: this rank cannot know what the others save."""


class KVStore(Protocol):
    """Messages by name; each is left once and stays until it is removed. Everything may raise AgreementLost."""

    @property
    def ranks(self) -> int:
        """Return how many ranks share this store."""
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
    """The board of a run with one process."""

    ranks = 1

    def __init__(self) -> None:
        self._messages: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def leave(self, name: str, message: Any) -> None:
        self._messages[name] = message

    def read(self, name: str, timeout: float = 0.0) -> Any:
        return self._messages.pop(name, None)

    def remove(self, name: str) -> None:
        self._messages.pop(name, None)
        self._counts.pop(name, None)

    def count(self, name: str, more: int = 0) -> int:
        self._counts[name] = self._counts.get(name, 0) + more
        return self._counts[name]


class SharedKVStore:
    """The board of a run with several: a TCPStore that rank 0 hosts at a port of its own (see open()), or any other.

    Names begin with a secret that is told by one broadcast, since a TCPStore asks nobody who they are.
    """

    def __init__(self, store: dist.Store, secret: str, ranks: int, timeout: float = _PATIENCE) -> None:
        """`timeout`: in seconds; a TCPStore whose host was stopped would never answer."""
        self.ranks = ranks
        self._store = store
        self._secret = secret
        self._calls = BoundedCalls(timeout)

    @classmethod
    def open(cls, group: dist.ProcessGroup, timeout: float) -> SharedKVStore:
        """Collective over `group` (gloo), all ranks of the run. `timeout`: in seconds, to connect and for an answer."""
        limit = datetime.timedelta(seconds=timeout)
        given = os.environ.get("MASTER_ADDR") or ""
        told: tuple[str, str, int, str] = ("", "", 0, "")
        if dist.get_rank() == 0:
            store = dist.TCPStore(given or "localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
            told = (given or address.find_host_address(), socket.gethostname(), store.port, secrets.token_hex(16))
        host, machine, port, secret = broadcast_from_first(told, group)
        if dist.get_rank() != 0:
            if not given and machine == socket.gethostname():
                host = "localhost"  # it may have no network
            try:
                store = BoundedCalls(timeout).run(
                    dist.TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=limit
                )
            except (RuntimeError, TimeoutError) as error:
                raise _make_agreement_lost(error) from error
        return cls(store, secret, dist.get_world_size(group), timeout)

    def leave(self, name: str, message: Any) -> None:
        full, data = f"{self._secret}/{name}", json.dumps(message).encode()
        try:
            if len(data) > _PIECE:
                packed = zlib.compress(data, 1)
                starts = range(0, len(packed), _PIECE)
                for i, start in enumerate(starts):
                    self._calls.run(self._store.set, f"{full}/{i}", packed[start : start + _PIECE])
                data = _PACKED + b"%d" % len(starts)  # last: who sees it finds the pieces
            self._calls.run(self._store.set, full, data)
        except (RuntimeError, TimeoutError) as error:
            raise _make_agreement_lost(error) from error

    def read(self, name: str, timeout: float = 0.0) -> Any:
        full = f"{self._secret}/{name}"
        until, pause, looks = time.monotonic() + timeout, _FIRST_PAUSE, 0
        try:
            while not self._calls.run(self._store.check, [full]):
                if (left := until - time.monotonic()) <= 0:
                    return None
                looks += 1
                if looks > _LOOKS_AT_ONCE:  # before, the answer may be on its way
                    time.sleep(min(pause, left))
                    pause = min(_GROWTH * pause, _LONGEST_PAUSE)
            return self._found(full)
        except (RuntimeError, TimeoutError) as error:
            raise _make_agreement_lost(error) from error

    def remove(self, name: str) -> None:
        full = f"{self._secret}/{name}"
        try:
            if self._calls.run(self._store.check, [full]):
                pieces = self._pieces(full, self._get(full))
                for each in (full, *pieces):
                    self._calls.run(self._store.delete_key, each)
        except (RuntimeError, TimeoutError) as error:
            raise _make_agreement_lost(error) from error

    def count(self, name: str, more: int = 0) -> int:
        try:
            return int(self._calls.run(self._store.add, f"{self._secret}/{name}", more))
        except (RuntimeError, TimeoutError) as error:
            raise _make_agreement_lost(error) from error

    def _found(self, full: str) -> Any:
        data = self._get(full)
        pieces = self._pieces(full, data)
        return json.loads(zlib.decompress(b"".join(map(self._get, pieces))) if pieces else data)

    def _get(self, full: str) -> bytes:
        return bytes(self._calls.run(self._store.get, full))

    def _pieces(self, full: str, data: bytes) -> list[str]:
        """Return the keys of the message's pieces, if it was too large for one; else none."""
        return [f"{full}/{i}" for i in range(int(data[1:]))] if data.startswith(_PACKED) else []


def _make_agreement_lost(error: RuntimeError | TimeoutError) -> AgreementLost:
    return AgreementLost(f"rank 0, which decides when to save, cannot be reached: {str(error).splitlines()[0]}")
