"""Detect a rank that fell silent, and report it to all ranks, beside the tensors.

Each process has a thread that tells its successor in a ring that it is alive, and listens to its predecessor. A rank
that hears nothing for `timeout` seconds, or sees the connection end without a message, names its predecessor to all. A
separate thread answers also while its process computes for long or waits: slow is not silent. A rank that fails says so
itself, with its reason; one that leaves says after how many steps. Each message has a code by a key that all ranks were
given: anybody may connect to an open port, and nobody without the key is believed. This module needs no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.coordination.errors import RankLost

Address = tuple[str, int]

_AT_ONCE = 64  # ranks that are told of a loss at the same time
_LONGEST = 1 << 16  # bytes without a new line: not of this job
_STRANGERS = 64  # connections that have said nothing of this job yet; the oldest gives way
_CODE = 2 * hashlib.sha256().digest_size  # characters before a word


@dataclass
class _Peer:
    """A connection that came in: what of its words is not complete yet, and who it is."""

    connection: socket.socket
    rest: bytes = b""
    rank: int = -1
    is_known: bool = False  # it has said something with the key


class Heartbeat:
    """`progress()` is a number that grows while this rank works, for the report on it; `passes()` how many steps,
    evaluations and other calls that all ranks make together it has begun. `on_lost(error)` is called once, in the
    thread of the heartbeat. Give `address` to all ranks, then `start` with those of all and the key."""

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
        self._passes: Callable[[], int] = lambda: 0
        self._interval = min(1.0, timeout / 5)
        self._server = socket.create_server((host, 0), family=_get_address_family(host))
        self._selector = selectors.DefaultSelector()
        self._listen(self._server, None)
        self._wake, self._woken = socket.socketpair()  # by which `stop` is seen at once
        self._listen(self._woken, None)
        self._ring: Sequence[Address] = ()
        self._key = b""
        self._next: socket.socket | None = None
        self._before: tuple[float, int] = (0.0, 0)  # when the predecessor was last heard, and how far it was
        self._left: int | None = None  # the passes after which it left
        self._lost: RankLost | None = None
        self._known, self._ending = threading.Event(), threading.Event()
        self._heard, self._joined, self._told = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-heartbeat", daemon=True)

    @property
    def address(self) -> Address:
        """Return the address at which this rank listens."""
        host, port = self._server.getsockname()[:2]
        return host, port

    def start(self, addresses: Sequence[Address], key: bytes) -> None:
        """Begin to send heartbeats and to listen.

        Args:
            addresses: The addresses of all ranks, in their order.
            key: A secret, the same on all ranks.
        """
        self._key = key
        self._ring = [(host, port) for host, port in addresses]
        self._before = (time.monotonic(), 0)
        self._thread.start()

    def joined(self) -> None:
        """Wait until this rank is heard by its successor and hears its predecessor; raise RankLost if a rank is
        lost."""
        while not self._joined.wait(0.02):
            if (lost := self.lost()) is not None:
                raise lost

    def follow(self, progress: Callable[[], int], passes: Callable[[], int]) -> None:
        """Set the functions that return this rank's progress and its number of passes from now on."""
        self._progress, self._passes = progress, passes

    def lost(self, wait: float = 0.0) -> RankLost | None:
        """Return the rank that is lost, as far as that is known within `wait` seconds, else None."""
        self._known.wait(wait)
        return self._lost

    def explain(self) -> RankLost | None:
        """Return the rank that is lost after something went wrong between ranks, or None if all have been heard
        since."""
        return self.lost(self.timeout + 1.0)

    def fail(self, error: BaseException) -> None:
        """Tell all others that this rank cannot go on, and why; do nothing if a rank was lost before."""
        if self._lost is None and self._thread.is_alive():
            first = (str(error).splitlines() or [""])[0][:300]
            lost = RankLost([self.rank], f"failed: {type(error).__name__}{': ' if first else ''}{first}")
            self._tell_all(lost)
            if self._lost is None:
                self._lost = lost
                self._known.set()
        self.stop()

    def stop(self) -> None:
        """Take leave of the others: the end of this process is no loss, as long as nobody begins another step. Its
        predecessor is watched until it has left too, at the end of the program for no longer than the timeout."""
        # They end with this rank, and what they refer to must not stay until the predecessor has left.
        progress, passes = self._progress(), self._passes()
        self.follow(lambda: progress, lambda: passes)
        self._ending.set()
        with contextlib.suppress(OSError):  # the thread may have ended
            self._wake.send(b".", socket.MSG_NOSIGNAL)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._told.wait(self.timeout)
            atexit.register(self._thread.join, self.timeout + 1.0)

    def _run(self) -> None:
        looked = due = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            stack.callback(self._told.set)
            while self._lost is None and not (self._told.is_set() and self._alone()):
                if not self._ending.is_set():
                    # By the clock: an answer to each heartbeat would be answered in turn, all around the ring.
                    if time.monotonic() >= due:
                        self._beat()
                        due = time.monotonic() + self._interval / 2
                elif not self._told.is_set():
                    self._tell_next({"leaves": self.rank, "passes": self._passes()})
                    self._told.set()
                wait = self._interval / 2 if self._ending.is_set() else due - time.monotonic()
                events = self._selector.select(max(0.0, wait))
                now = time.monotonic()
                if now - looked > 2 * self._interval and self._left is None:
                    # This process itself stood still: what it has not heard says nothing of others.
                    self._before = now, self._before[1]
                looked = now
                for key, _ in events:
                    self._hear(key)
                if self._next is not None and self._heard.is_set():
                    self._joined.set()
                if len(self._ring) > 1 and self._lost is None:
                    self._look(now)
            if self._lost is not None:
                # The successor reads this before it sees the connection end.
                self._tell_next(_encode_lost_rank(self._lost))

    def _alone(self) -> bool:
        """Tell whether there is no rank to watch."""
        return self._left is not None or len(self._ring) < 2

    def _look(self, now: float) -> None:
        silent = now - self._before[0]
        if silent > self.timeout:
            how = (
                self._how_far()
                if self._heard.is_set()
                else "nothing of it has ever come to {}:{}".format(*self.address)
            )
            self._name(self._predecessor, f"gave no sign of life for {silent:.1f} s ({how})")
        elif self._left is not None and self._passes() > self._left:
            self._name(
                self._predecessor,
                f"has left after {self._left} calls that all ranks make together (step, evaluate, clip_grad_norm_, a "
                "sharded optimizer's step), and others have begun another: all ranks must do as many",
            )

    def _beat(self) -> None:
        if len(self._ring) < 2:
            return
        if self._next is None:
            with contextlib.suppress(OSError):
                self._next = socket.create_connection(self._ring[self._successor], self._interval)
        self._tell_next({"alive": self.rank, "progress": self._progress()})

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._woken:
            self._woken.recv(64)
            return
        if key.data is None:
            # Who came may be gone again, and where there are no more files, this rank still hears its predecessor.
            with contextlib.suppress(OSError):
                connection, _ = self._server.accept()
                self._make_room()
                self._listen(connection, _Peer(connection))
            return
        peer: _Peer = key.data
        try:
            data = peer.connection.recv(65536)
        except OSError:
            data = b""
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        is_of_this_job = all(self._understand(peer, line) for line in lines)
        if not data or not is_of_this_job or len(peer.rest) > _LONGEST:
            self._leave(peer)
            if peer.rank == self._predecessor and self._lost is None:
                self._name(self._predecessor, f"has ended ({self._how_far()})")

    def _leave(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()

    def _make_room(self) -> None:
        """Close the oldest connection that has not identified itself, if there are too many of these.

        So a client that says nothing does not keep ranks away.
        """
        peers = [key.data for key in self._selector.get_map().values() if key.data is not None]
        strangers = [peer for peer in peers if not peer.is_known]
        if len(strangers) >= _STRANGERS:
            self._leave(strangers[0])

    def _understand(self, peer: _Peer, line: bytes) -> bool:
        """Tell whether a line is of this job; what it says is known then."""
        code, text = line[:_CODE], line[_CODE:]
        if not hmac.compare_digest(code, self._code(self.rank, text)):
            return False
        peer.is_known = True
        word: dict[str, Any] = json.loads(text)
        if word.get("alive") == self._predecessor:
            self._before = time.monotonic(), int(word["progress"])
            peer.rank = self._predecessor
            self._heard.set()
        elif word.get("leaves") == self._predecessor:
            self._left = int(word["passes"])
            self._before = float("inf"), self._before[1]
            peer.rank = -1
        elif "lost" in word:
            self._settle(RankLost([int(word["lost"])], str(word["why"])))
        return True

    def _code(self, to: int, text: bytes) -> bytes:
        """Return the code that shows that a rank of this job has sent this text to that rank."""
        return hmac.new(self._key, b"%d " % to + text, hashlib.sha256).hexdigest().encode()

    def _line(self, to: int, word: dict[str, Any]) -> bytes:
        text = json.dumps(word).encode()
        return self._code(to, text) + text + b"\n"

    def _name(self, rank: int, why: str) -> None:
        lost = RankLost([rank], why)
        self._tell_all(lost)
        self._settle(lost)

    def _tell_all(self, lost: RankLost) -> None:
        others = [rank for rank in range(len(self._ring)) if rank not in (*lost.ranks, self.rank)]
        for start in range(0, len(others), _AT_ONCE):
            self._tell_these(others[start : start + _AT_ONCE], _encode_lost_rank(lost))

    def _tell_these(self, ranks: Sequence[int], word: dict[str, Any]) -> None:
        """All at once: of those that are gone with the first, each would cost its own wait."""
        until = time.monotonic() + self._interval
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as waiting:
            for rank in ranks:
                host, port = self._ring[rank]
                connection = stack.enter_context(socket.socket(_get_address_family(host)))
                connection.setblocking(False)
                connection.connect_ex((host, port))
                waiting.register(connection, selectors.EVENT_WRITE, self._line(rank, word))
            while waiting.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    assert isinstance(key.fileobj, socket.socket)
                    told = key.events == selectors.EVENT_READ
                    with contextlib.suppress(OSError):
                        if not told:
                            key.fileobj.sendall(key.data, socket.MSG_NOSIGNAL)
                            # It is known there before this process ends, which would else be taken for another loss.
                            key.fileobj.shutdown(socket.SHUT_WR)
                            waiting.modify(key.fileobj, selectors.EVENT_READ)
                            continue
                    waiting.unregister(key.fileobj)

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

    @property
    def _successor(self) -> int:
        return (self.rank + 1) % len(self._ring)

    def _listen(self, connection: socket.socket, peer: _Peer | None) -> None:
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _tell_next(self, word: dict[str, Any]) -> None:
        if self._next is not None:
            # Who does not take it is watched by its own successor.
            with contextlib.suppress(OSError):
                self._next.sendall(self._line(self._successor, word), socket.MSG_NOSIGNAL)

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._wake.close()
        if self._next is not None:
            self._next.close()


def _encode_lost_rank(lost: RankLost) -> dict[str, Any]:
    return {"lost": lost.ranks[0], "why": lost.why}


def _get_address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
