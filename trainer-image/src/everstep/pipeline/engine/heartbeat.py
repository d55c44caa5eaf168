"""Which rank fell silent, known on all ranks, beside the tensors.

Each process has a thread that tells its successor in a ring that it is alive, and listens to its predecessor. The one
that hears nothing for `timeout` seconds, or sees the connection end without a word, names its predecessor to all. A
thread of its own answers also while its process computes for long or waits: slow is not silent. Needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Address = tuple[str, int]


class RankLost(RuntimeError):
    """A process of the job is gone or stands still; the same `rank` on all that are left."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}; all ranks have to be started again")
        self.rank, self.why = rank, why


@dataclass
class _Peer:
    """A connection that came in: what of its words is not complete yet, and who it is."""

    connection: socket.socket
    rest: bytes = b""
    rank: int = -1


class Heartbeat:
    """`progress()` is a number that grows while this rank works, for the report on it; `on_lost(error)` is called once,
    in the thread of the heartbeat. Give `address` to all ranks, then `start` with those of all."""

    def __init__(
        self,
        rank: int,
        timeout: float,
        progress: Callable[[], int] = lambda: 0,
        on_lost: Callable[[RankLost], None] = lambda error: None,
        host: str = "127.0.0.1",
    ) -> None:
        self.rank, self.timeout = rank, timeout
        self._progress, self._on_lost = progress, on_lost
        self._interval = min(1.0, timeout / 5)
        self._server = socket.create_server((host, 0))
        self._selector = selectors.DefaultSelector()
        self._listen(self._server, None)
        self._ring: Sequence[Address] = ()
        self._next: socket.socket | None = None
        self._before: tuple[float, int] = (0.0, 0)  # when the predecessor was last heard, and how far it was
        self._lost: RankLost | None = None
        self._known, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-heartbeat", daemon=True)

    @property
    def address(self) -> Address:
        """Where this rank listens."""
        host, port = self._server.getsockname()[:2]
        return host, port

    def start(self, addresses: Sequence[Address]) -> None:
        """Begins to tell and to listen; `addresses` of all ranks, in their order."""
        self._ring = [(host, port) for host, port in addresses]
        self._before = (time.monotonic(), 0)
        self._thread.start()

    def lost(self, wait: float = 0.0) -> RankLost | None:
        """Who is lost, as far as that is known within `wait` seconds."""
        self._known.wait(wait)
        return self._lost

    def explain(self) -> RankLost | None:
        """After something went wrong between ranks: who is lost, or None if all have been heard since."""
        return self.lost(self.timeout + 1.0)

    def stop(self) -> None:
        """Takes leave of the others: the end of this process is no loss."""
        self._ending.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        looked = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            while not self._ending.is_set() and self._lost is None:
                self._beat()
                events = self._selector.select(self._interval / 2)
                now = time.monotonic()
                if now - looked > 2 * self._interval:
                    # This process itself stood still: what it has not heard says nothing of others.
                    self._before = now, self._before[1]
                looked = now
                for key, _ in events:
                    self._hear(key)
                silent = now - self._before[0]
                if len(self._ring) > 1 and silent > self.timeout and self._lost is None:
                    self._name(self._predecessor, f"gave no sign of life for {silent:.1f} s ({self._how_far()})")
            # The successor reads this before it sees the connection end.
            lost = self._lost
            self._tell(self._next, _lost(lost) if lost is not None else {"leaves": self.rank})

    def _beat(self) -> None:
        if len(self._ring) < 2:
            return
        if self._next is None:
            with contextlib.suppress(OSError):
                self._next = socket.create_connection(self._ring[(self.rank + 1) % len(self._ring)], self._interval)
        self._tell(self._next, {"alive": self.rank, "progress": self._progress()})

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            connection, _ = self._server.accept()
            self._listen(connection, _Peer(connection))
            return
        peer: _Peer = key.data
        try:
            data = peer.connection.recv(65536)
        except OSError:
            data = b""
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        for line in lines:
            self._understand(peer, line)
        if not data:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            if peer.rank == self._predecessor and self._lost is None:
                self._name(self._predecessor, f"has ended ({self._how_far()})")

    def _understand(self, peer: _Peer, line: bytes) -> None:
        try:
            word: dict[str, Any] = json.loads(line)
        except ValueError:
            return  # not of this job
        if word.get("alive") == self._predecessor:
            peer.rank = self._predecessor
            self._before = time.monotonic(), int(word["progress"])
        elif word.get("leaves") == self._predecessor:
            peer.rank = -1
            self._before = float("inf"), self._before[1]
        elif "lost" in word:
            self._settle(RankLost(int(word["lost"]), str(word["why"])))

    def _name(self, rank: int, why: str) -> None:
        lost = RankLost(rank, why)
        for other, address in enumerate(self._ring):
            if other not in (rank, self.rank):
                with contextlib.suppress(OSError), socket.create_connection(address, self._interval) as connection:
                    connection.settimeout(self._interval)
                    self._tell(connection, _lost(lost))
                    # It is known there before this process ends, which would else be taken for another loss.
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)
        self._settle(lost)

    def _settle(self, lost: RankLost) -> None:
        if self._lost is None:
            self._lost = lost
            self._known.set()
            self._on_lost(lost)

    def _how_far(self) -> str:
        return f"it had done {self._before[1]} actions"

    @property
    def _predecessor(self) -> int:
        return (self.rank - 1) % len(self._ring)

    def _listen(self, connection: socket.socket, peer: _Peer | None) -> None:
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _tell(self, connection: socket.socket | None, word: dict[str, Any]) -> None:
        if connection is not None:
            # Who does not take it is watched by its own successor.
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(word).encode() + b"\n")

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        if self._next is not None:
            self._next.close()


def _lost(lost: RankLost) -> dict[str, Any]:
    return {"lost": lost.rank, "why": lost.why}
