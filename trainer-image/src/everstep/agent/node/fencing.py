"""Leases, and what happens without one.

A leader's lease is renewed by the operator's authenticated polls or, while those are missing, by any TLS answer of the
API server: both prove that this side of a partition is the one where pods are replaced. Pings carry the age of that
renewal to the nodes, so that all of them expire within one fence timeout of it, however the network was cut. Leases are
on a clock that goes on while a machine is suspended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Callable

from everstep.agent.ranks.container_contract import name_attempt
from everstep.agent.system.faults import name_file_in_errors
from everstep.agent.wire.http_client import connect_to_agent

PROBE_SECONDS = 3.0
READABLE = (
    0o644  # whatever the umask: ranks may run as another user, and one that cannot read a fence publishes nothing
)
SUSPENDED_SECONDS = 0.5  # less is a process that was starved between two looks at clocks
_TLS_ALERT, _TLS_HANDSHAKE = 0x15, 0x16


class LeaderLease:
    def __init__(self, timeout: float, now: float) -> None:
        self.timeout = timeout
        self.renewed = now

    def renew(self, now: float, age: float = 0.0) -> None:
        """Renew the lease. `age`: how long ago, in seconds, whoever renews us was renewed itself."""
        self.renewed = max(self.renewed, now - max(age, 0.0))

    def age(self, now: float) -> float:
        return max(0.0, now - self.renewed)

    def expired(self, now: float) -> bool:
        return self.age(now) >= self.timeout

    def wants_probe(self, now: float) -> bool:
        return self.age(now) >= self.timeout / 2


class StallDetector:
    """Notices that this process stood still: its machine was suspended, which two clocks show, of which one stood still
    meanwhile; or the process was stopped or starved, which shows where it did not look at clocks in time.

    What is read in the first second after that may have been sent before: it is as much older.
    """

    def __init__(self, clock: Callable[[], float], lease_clock: Callable[[], float], interval: float) -> None:
        """Begin now; `note_running` will be called every `interval` seconds."""
        self._clock = clock
        self._lease_clock = lease_clock
        self.interval = interval
        self._apart = lease_clock() - clock()
        self._ran = clock()
        self._stood = self._until = 0.0

    def note_running(self) -> None:
        now = self._clock()
        slept = self._lease_clock() - now - self._apart
        stood = slept if slept > SUSPENDED_SECONDS else 0.0
        if now - self._ran > 2 * self.interval:
            stood += now - self._ran
        if stood > 0:
            self._stood, self._until = max(stood, self._stood if now < self._until else 0.0), now + 1.0
        self._apart += slept
        self._ran = now

    def age(self) -> float:
        """Return by how many seconds a message that is read now may be older than it looks."""
        self.note_running()
        return self._stood if self._ran < self._until else 0.0


class FenceFile:
    """`fence.json`: the fencing token of this node's ranks and whether it still holds.

    Written whole before any rank of a generation starts; the checkpoint library reads it before it publishes. A rank
    whose own (epoch, generation) is not the file's is of an older generation and must not publish either.
    """

    def __init__(self, path: Path, attempt_base: int) -> None:
        self._path = path
        self._attempt_base = attempt_base
        self._written: dict[str, object] | None = None

    def write(self, epoch: int, generation: int, fenced: bool) -> None:
        """Replace the token.

        Args:
            epoch: The leader's.
            generation: That of the ranks that may publish.
            fenced: Whether they may not, for want of a lease.

        Raises:
            OSError: The volume is full or read-only. What stood in the file is then emptied, if that is possible: a
                token that cannot be read allows nothing.
        """
        state: dict[str, object] = {"epoch": epoch, "generation": generation, "fenced": fenced}
        if (attempt := name_attempt(self._attempt_base, epoch, generation)) is not None:
            state["attempt"] = attempt
        if state == self._written:
            return
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            with name_file_in_errors(fresh):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                fresh.write_text(json.dumps(state))
                fresh.chmod(READABLE)
                os.replace(fresh, self._path)  # noqa: PTH105 - atomic: a reader sees the old state or the new
        except OSError:
            self._written = None
            with contextlib.suppress(OSError):
                os.truncate(self._path, 0)
            raise
        self._written = state


def find_api_server(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where the API server is, for a process in a pod; None elsewhere."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "")
    return (host, int(port)) if host and port.isdecimal() else None


async def answers_tls(host: str, port: int) -> bool:
    """Return True if something there answers a TLS greeting, be it with an alert. Neither the ssl module nor a token is
    needed."""
    try:
        reader, writer = await asyncio.wait_for(connect_to_agent(f"{host}:{port}"), PROBE_SECONDS)
    except (OSError, ValueError, OverflowError, asyncio.TimeoutError):  # those two for what is no address
        return False
    try:
        writer.write(make_client_hello())
        first = await asyncio.wait_for(reader.readexactly(1), PROBE_SECONDS)
        return first[0] in (_TLS_ALERT, _TLS_HANDSHAKE)
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        return False
    finally:
        writer.transport.abort()


def make_client_hello() -> bytes:
    """Return a minimal ClientHello of TLS 1.2 (RFC 5246, 7.4.1.2): one cipher suite, no extensions."""
    suites = bytes.fromhex("c02f")  # ECDHE_RSA_WITH_AES_128_GCM_SHA256
    body = b"\x03\x03" + os.urandom(32) + b"\x00" + len(suites).to_bytes(2, "big") + suites + b"\x01\x00"
    handshake = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(handshake).to_bytes(2, "big") + handshake
