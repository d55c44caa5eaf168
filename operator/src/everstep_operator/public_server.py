"""A small HTTP/1.1 server for callers that nobody knows: bounded in connections, in time, and in what it reads.

Any pod of the cluster may reach it. A server that keeps all that connect would run out of files, and with it the
operator, which needs one for each request to the API server and each leader.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from everstep.agent.wire.http_server import lengthen_queue

log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 32  # then the oldest is dropped
ACCEPTED_AT_ONCE = 4  # in one turn of the loop: an honest request is answered within five turns
MAX_HEAD = 8 * 1024
SECONDS = 10.0  # that a connection lasts at most

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


@dataclass(frozen=True, slots=True)
class PublicAnswer:
    """An answer of a route."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class PublicServer:
    """Answers GET and HEAD on a few paths, one request on each connection."""

    def __init__(self, routes: Mapping[str, Callable[[], PublicAnswer]]) -> None:
        self._routes = routes
        self._connections: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> int:
        """Serve on a bound socket, and return its port."""
        server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_HEAD, backlog=ACCEPTED_AT_ONCE)
        lengthen_queue(server)
        self._server = server
        return int(server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening, and drop whoever is connected."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[writer] = None
        # Until the kernel has all of an answer: what is left of one would keep a connection that nobody counts.
        writer.transport.set_write_buffer_limits(0)
        try:
            async with asyncio.timeout(SECONDS):
                await self._answer_request(reader, writer)
        except (OSError, EOFError):  # the caller went away, or is too slow
            writer.transport.abort()
        finally:
            self._connections.pop(writer, None)
            writer.close()

    async def _answer_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            method, answer = "GET", PublicAnswer(431, b"")
        else:
            method, answer = self._find_answer(head)
        lines = [f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}", f"Content-Type: {answer.content_type}"]
        lines += [f"Content-Length: {len(answer.body)}", "Connection: close", "", ""]
        writer.write("\r\n".join(lines).encode() + (b"" if method == "HEAD" else answer.body))
        await writer.drain()

    def _find_answer(self, head: bytes) -> tuple[str, PublicAnswer]:
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "GET", PublicAnswer(400, b"")
        method, route = words[0], self._routes.get(words[1].partition("?")[0])
        if route is None:
            return method, PublicAnswer(404, b"")
        if method not in ("GET", "HEAD"):
            return method, PublicAnswer(405, b"")
        try:
            return method, route()
        except Exception:
            log.exception("a request for health or metrics failed", path=words[1][:100])
            return method, PublicAnswer(500, b"")
