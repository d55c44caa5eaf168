"""A connection to a leader, on which an answer costs no more than its bytes.

A leader is a pod that runs a user's code. HTTP in full lets a server make its client work without end: informational
responses, chunks of a byte, extensions of chunks, compression. Agents send none of these, and nothing of them is read.
Nor is anything read that was not asked for, what comes byte by byte, and more of long answers than there is room for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from everstep.agent.wire.http_client import RequestRejected, parse_response_head

CONNECT_SECONDS = 3.0
MAX_HEAD = 4 * 1024  # an agent sends a tenth of it, and a proxy on the way may add to that
# An agent sends an answer at once, and TCP in segments of 536 bytes and more: so often it may arrive. Each piece costs
# as much of the processor as thousands of bytes.
BASE_PIECES, BYTES_OF_A_PIECE = 64, 256
KEEPALIVE_SECONDS, KEEPALIVES_LOST = 2, 3
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES_LOST),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * KEEPALIVE_SECONDS * (1 + KEEPALIVES_LOST)),
)
_END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class LeaderResponse:
    """A response as it came; nothing of it is proved. `headers` by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class AnswerRoom:
    """Memory for the long answers that are on their way from all leaders.

    A leader that stops in the middle of one would keep its part for as long as it may take. An honest one has sent it
    within milliseconds: so whoever began first makes room for the next.
    """

    max_bytes: int = 32 << 20
    small_bytes: int = 16 << 10  # shorter answers are not counted
    _taken: dict[object, tuple[int, Callable[[], None]]] = field(default_factory=dict)  # oldest first

    @contextlib.contextmanager
    def take(self, num_bytes: int, give_up: Callable[[], None]) -> Iterator[None]:
        """Hold room for an answer while the block runs.

        Args:
            num_bytes: Length of the answer.
            give_up: Called if another one needs the room; nothing of this answer may be kept then.
        """
        if num_bytes <= self.small_bytes:
            yield
            return
        while self._taken and sum(each for each, _ in self._taken.values()) + num_bytes > self.max_bytes:
            _, drop = self._taken.pop(next(iter(self._taken)))
            drop()
        mine = object()
        self._taken[mine] = num_bytes, give_up
        try:
            yield
        finally:
            self._taken.pop(mine, None)


class LeaderConnection:
    """Opened by the first request, and again by the next one after it has broken."""

    def __init__(self, address: str, room: AnswerRoom | None = None) -> None:
        """Make one to `address` ("ip:port", an IPv6 address in brackets); `room` is shared by all connections."""
        self._address = address
        self._room = room or AnswerRoom()
        self._receiver: _Receiver | None = None
        self._pieces = 0

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self._receiver is not None:
            self._receiver.abort()
            self._receiver = None

    def take_pieces(self) -> int:
        """Return in how many pieces answers have come since the last call."""
        pieces, self._pieces = self._pieces, 0
        return pieces

    async def exchange(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes, *, max_bytes: int, seconds: float
    ) -> LeaderResponse:
        """Send a request, and return the response.

        Args:
            method: The HTTP method.
            target: The path with its query, sent as it is.
            headers: Headers of the request.
            body: Its body.
            max_bytes: The longest body of a response that is read.
            seconds: Time for all of it.

        Raises:
            OSError: The leader cannot be reached, or does not answer in time.
            RequestRejected: What it sent is not what an agent sends.
        """
        if not (target.isascii() and target.isprintable()) or " " in target:
            raise RequestRejected(0, f"not the target of a request: {target[:100]!r}")
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._address}", f"Content-Length: {len(body)}"]
        message = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""])
        is_open = self._receiver is not None
        try:
            async with asyncio.timeout(seconds):
                try:
                    return await self._exchange(message.encode() + body, max_bytes)
                except ConnectionError:
                    if not is_open:
                        raise
                    self.close()  # the leader has closed it since, or was started again
                    return await self._exchange(message.encode() + body, max_bytes)
        except BaseException:
            self.close()
            raise

    async def _exchange(self, message: bytes, max_bytes: int) -> LeaderResponse:
        if self._receiver is None:
            self._receiver = await _connect(self._address)
        receiver = self._receiver
        receiver.send(message)
        try:
            head = await receiver.receive_head()
            status, headers, length = parse_response_head(head, max_bytes)
            with self._room.take(length, receiver.abort):
                body = await receiver.receive_body(length)
        finally:
            self._pieces += receiver.pieces
        if headers.get("connection", "").lower() == "close":
            self.close()
        return LeaderResponse(status, headers, body)


class _Receiver(asyncio.Protocol):
    """Reads one answer at a time, and nothing in between: what a leader sends unasked stays in the kernel."""

    def __init__(self) -> None:
        self.pieces = 0  # in which the answer has come
        self._data = bytearray()
        self._wanted: Callable[[], int | None] = lambda: None  # the length of what is waited for; None: not known yet
        self._waiter: asyncio.Future[bytes] | None = None
        self._lost: BaseException | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("the connection was closed before the answer was complete"))

    def data_received(self, data: bytes) -> None:
        self.pieces += 1
        self._data += data
        if self.pieces > BASE_PIECES + len(self._data) // BYTES_OF_A_PIECE:
            self._fail(RequestRejected(0, f"an answer in {self.pieces} pieces of {len(self._data)} bytes"))
        self._look()

    def abort(self) -> None:
        """Close the connection at once, and keep nothing of what came."""
        self._fail(OSError("the connection was closed: nobody waits for it, or other answers needed its room"))
        self._transport.abort()

    def send(self, message: bytes) -> None:
        """Send a request. What has come before it was not asked for."""
        self.pieces = 0
        self._transport.write(message)

    async def receive_head(self) -> bytes:
        """Return the head of an answer, with the empty line at its end."""
        return await self._receive(self._find_head)

    async def receive_body(self, length: int) -> bytes:
        """Return the body, which ends the answer."""
        body = await self._receive(lambda: length)
        if self._data:
            raise RequestRejected(0, "more than the answer")
        return body

    async def _receive(self, wanted: Callable[[], int | None]) -> bytes:
        if self._lost is not None:
            raise self._lost
        self._wanted, self._waiter = wanted, asyncio.get_running_loop().create_future()
        self._look()
        if not self._waiter.done():
            self._transport.resume_reading()
        try:
            return await self._waiter
        finally:
            self._waiter = None
            self._transport.pause_reading()

    def _find_head(self) -> int | None:
        at = self._data.find(_END_OF_HEAD, 0, MAX_HEAD)
        if at < 0 and len(self._data) >= MAX_HEAD:
            self._fail(RequestRejected(0, "the answer is not HTTP"))
        return None if at < 0 else at + len(_END_OF_HEAD)

    def _look(self) -> None:
        """Hand over what is waited for, if it is there."""
        if self._waiter is None or self._waiter.done():
            return
        length = self._wanted()
        if length is None or len(self._data) < length:
            return
        found, self._data = bytes(self._data[:length]), self._data[length:]
        self._transport.pause_reading()
        self._waiter.set_result(found)

    def _fail(self, error: BaseException) -> None:
        if self._lost is None:
            self._lost, self._data = error, bytearray()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._lost)


async def _connect(address: str) -> _Receiver:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(CONNECT_SECONDS):
        loop = asyncio.get_running_loop()
        transport, receiver = await loop.create_connection(_Receiver, host.strip("[]"), int(port))
    # A dead machine at the other end, of which no packet tells, is noticed before a poll is over.
    for option in _OPTIONS:
        transport.get_extra_info("socket").setsockopt(*option)
    return receiver
