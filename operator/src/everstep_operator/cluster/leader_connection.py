"""A connection to a leader, on which an answer costs no more than its bytes.

A leader is a pod that runs a user's code. HTTP in full lets a server make its client work without end: informational
responses, chunks of a byte, extensions of chunks, compression. Agents send none of these, and nothing of them is read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.agent.wire.http_client import RequestRejected, Streams, read_response

CONNECT_SECONDS = 3.0
KEEPALIVE_SECONDS, KEEPALIVES_LOST = 2, 3
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES_LOST),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * KEEPALIVE_SECONDS * (1 + KEEPALIVES_LOST)),
)


@dataclass(frozen=True, slots=True)
class LeaderResponse:
    """A response as it came; nothing of it is proved. `headers` by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class LeaderConnection:
    """Opened by the first request, and again by the next one after it has broken."""

    def __init__(self, address: str) -> None:
        """Make one to `address` ("ip:port", an IPv6 address in brackets)."""
        self._address = address
        self._streams: Streams | None = None

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

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
        is_open = self._streams is not None
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
        if self._streams is None:
            self._streams = await _connect(self._address)
        reader, writer = self._streams
        writer.write(message)
        status, headers, body = await read_response(reader, max_bytes)
        if headers.get("connection", "").lower() == "close":
            self.close()
        return LeaderResponse(status, headers, body)


async def _connect(address: str) -> Streams:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(CONNECT_SECONDS):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    # A dead machine at the other end, of which no packet tells, is noticed before a poll is over.
    for option in _OPTIONS:
        writer.get_extra_info("socket").setsockopt(*option)
    return reader, writer
