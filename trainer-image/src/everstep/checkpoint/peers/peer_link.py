"""Connect writers, and ranks that restore, over TCP: a peer without the run's secret is rejected.

A connection begins with a challenge from each end, answered by HMAC-SHA256 under the secret; the secret itself is never
sent. After that: messages, each one line of JSON behind its length in four bytes, and raw bytes where a message says
so. The peer is authenticated, not each byte: bytes are checked against the manifest's sums, as everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Self

from everstep.checkpoint.errors import StoreError

Address = tuple[str, int]

CONNECT_TIMEOUT = 5.0  # seconds, also for each half of the challenge
TIMEOUT = 30.0  # seconds without a byte
MAX_MESSAGE = 1 << 28

_GREETING = b"EVERSTEP PEER 1\n"
_NONCE = 32
_LENGTH = struct.Struct("!I")


class PeerLost(StoreError):
    """The other node's writer cannot be reached, says nothing, or has not what it is asked for."""


class PeerLink:
    """One end of a connection whose other end has shown that it knows the secret. One thread at a time.

    Every call waits for TIMEOUT seconds at most and raises PeerLost; the connection is of no use then.
    """

    def __init__(self, peer: socket.socket, name: str) -> None:
        self._peer = peer
        self.name = name

    @classmethod
    def connect(cls, address: Address, secret: str) -> Self:
        """Connect to a peer that knows the secret.

        Raises:
            PeerLost: Nobody is there, or who is there does not know the secret.
        """
        name = f"the writer at {address[0]}:{address[1]}"
        try:
            peer = socket.create_connection(address, CONNECT_TIMEOUT)
        except OSError as error:
            raise PeerLost(f"cannot be reached: {error}", name, may_pass=True) from error
        link = cls(peer, name)
        try:
            link._limit(CONNECT_TIMEOUT)
            greeting = link.get(len(_GREETING) + _NONCE)
            if not greeting.startswith(_GREETING):
                raise PeerLost("is no writer of this version", name)
            theirs, ours = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE)
            link.put(ours + _compute_proof(secret, b"client", theirs, ours))
            try:
                proof = link.get(hashlib.sha256().digest_size)
            except PeerLost as error:
                raise PeerLost("does not know this attempt, or does not take part in it any more", name) from error
            if not hmac.compare_digest(proof, _compute_proof(secret, b"server", theirs, ours)):
                raise PeerLost("does not know this attempt's secret", name)
            link._limit(TIMEOUT)
        except BaseException:
            link.close()
            raise
        return link

    @classmethod
    def accept(cls, peer: socket.socket, secret: Callable[[], str]) -> Self | None:
        """Return the other end of connect(); None, and closed, when whoever called does not know the secret."""
        link = cls(peer, "a peer")
        try:
            link._limit(CONNECT_TIMEOUT)
            ours = secrets.token_bytes(_NONCE)
            link.put(_GREETING + ours)
            answer = link.get(_NONCE + hashlib.sha256().digest_size)
            theirs, proof, known = answer[:_NONCE], answer[_NONCE:], secret()
            if not known or not hmac.compare_digest(proof, _compute_proof(known, b"client", ours, theirs)):
                raise PeerLost("does not know the secret", link.name)
            link.put(_compute_proof(known, b"server", ours, theirs))
            link._limit(TIMEOUT)
        except (PeerLost, OSError):
            link.close()
            return None
        return link

    def close(self) -> None:
        self._peer.close()

    def abort(self) -> None:
        """Abort the link from another thread: a call of this link that waits raises PeerLost."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def call(self, verb: str, **fields: Any) -> Any:
        """Send a message and return the answer. PeerLost with the other end's words when it refuses."""
        self.tell({"verb": verb, **fields})
        return self.answer()

    def answer(self) -> Any:
        """Return what the other end says to the last message.

        Raises:
            PeerLost: It hung up, or reports an error.
        """
        said = self.hear()
        if said is None or "error" in said:
            raise PeerLost("hung up" if said is None else str(said["error"]), self.name)
        return said.get("ok")

    def tell(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self.put(_LENGTH.pack(len(data)) + data)

    def hear(self) -> dict[str, Any] | None:
        """Return the next message; None when the other end has closed the connection between two messages."""
        first = self._some(_LENGTH.size)
        if not first:
            return None
        [length] = _LENGTH.unpack(first + self.get(_LENGTH.size - len(first)))
        if length > MAX_MESSAGE:
            raise PeerLost(f"sends a message of {length} bytes", self.name)
        try:
            said = json.loads(self.get(length))
        except ValueError as error:
            raise PeerLost("does not speak JSON", self.name) from error
        if not isinstance(said, dict):
            raise PeerLost("sends no message", self.name)
        return said

    def get(self, count: int) -> bytes:
        """Return exactly `count` raw bytes."""
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, into: memoryview) -> None:
        """Receive raw bytes until `into` is full."""
        while into:
            try:
                count = self._peer.recv_into(into, len(into), socket.MSG_WAITALL)
            except OSError as error:
                raise self._lost(error) from error
            if not count:
                raise PeerLost("hung up", self.name)
            into = into[count:]

    def put(self, data: bytes | memoryview) -> None:
        try:
            self._peer.sendall(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._lost(error) from error

    def put_file(self, descriptor: int, offset: int, count: int) -> None:
        """Send `count` raw bytes of a file.

        They are not copied on their way: who changes them meanwhile spoils them.
        """
        while count:
            try:
                with _without_broken_pipes():
                    sent = os.sendfile(self._peer.fileno(), descriptor, offset, count)
            except OSError as error:
                raise self._lost(error) from error
            if not sent:
                raise PeerLost("the file ended before the bytes that were promised", self.name)
            offset, count = offset + sent, count - sent

    def _some(self, most: int) -> bytes:
        try:
            return self._peer.recv(most)
        except OSError as error:
            raise self._lost(error) from error

    def _limit(self, seconds: float) -> None:
        """Set the kernel's time limit on blocking calls, in seconds.

        So a piece of megabytes is one call, however it comes in.
        """
        self._peer.settimeout(None)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._peer.setsockopt(socket.SOL_SOCKET, option, limit)
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _lost(self, error: OSError) -> PeerLost:
        why = "says nothing any more" if isinstance(error, BlockingIOError) else f"is lost: {error}"
        return PeerLost(why, self.name, may_pass=True)


@contextlib.contextmanager
def _without_broken_pipes() -> Iterator[None]:
    """Let a call without MSG_NOSIGNAL fail where the peer has hung up: a script may have SIGPIPE end its process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    finally:
        if signal.SIGPIPE not in before:
            signal.sigtimedwait({signal.SIGPIPE}, 0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPIPE})


def _compute_proof(secret: str, role: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.new(secret.encode(), b"everstep " + role + server + client, hashlib.sha256).digest()
