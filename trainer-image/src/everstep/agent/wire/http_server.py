"""The agent's one port: a small HTTP/1.1 server that answers nobody whom it does not know.

Written for two kinds of callers: an operator that polls over kept-alive connections, and strangers who send garbage,
send slowly, or send nothing. A stranger gets a challenge or a bare status, holds a connection for at most ten seconds,
and is the one who is dropped when there are too many.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple
from urllib.parse import parse_qsl

from everstep.agent.system.agent_log import log_line

from . import auth

MAX_HEAD = 16 * 1024
MAX_BODY = 1024 * 1024  # of a caller that has proved itself on this connection
MAX_FIRST_BODY = 256 * 1024  # of any other: a table of the addresses of 4,096 nodes has room in it
MAX_FIRST_BODIES = 1024 * 1024  # of all these together, but for small ones
SMALL_BODY = 4 * 1024
SEND_SECONDS = 10.0  # to send a request, for strangers from the first moment until they are known
MAX_CHALLENGES = 8  # that a stranger may ask for on one connection
IDLE_SECONDS = 75.0  # between the requests of a known caller
MAX_CONNECTIONS = 128
ACCEPTED_AT_ONCE = 16  # in one turn of the loop; it takes a few turns until one can be dropped
WAITING_CONNECTIONS = 1024  # in the kernel, until they are accepted: all agents of a large job may come at once

_REASONS = {
    101: "Switching Protocols",
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


class HttpRequest(NamedTuple):
    method: str
    target: str
    path: str
    query: dict[str, str]
    body: bytes
    nonce: str
    client: str
    age: float = 0.0  # seconds since its nonce was handed out: it was sent no longer ago

    def json(self) -> dict[str, Any]:
        try:
            data = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, "the body is not JSON") from error
        if not isinstance(data, dict):
            raise HttpError(400, "the body is not an object")
        return data


# Takes the connection over; the server does not touch it any more once this returns.
Upgrade = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class HttpResponse(NamedTuple):
    status: int
    body: bytes = b""
    upgrade: Upgrade | None = None

    @classmethod
    def of(cls, data: Any, status: int = 200) -> HttpResponse:
        # As UTF-8: escapes take up to three times as much, and answers are bounded. What a rank printed may be no text.
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
        return cls(status, text.encode(errors="replace"))


class HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


@dataclass
class _Connection:
    writer: asyncio.StreamWriter
    opened: float
    known: bool = False
    challenges: int = 0

    def seconds_left(self, of_known: float, now: float) -> float:
        """Return how long to wait for what the caller sends next; `of_known` if it has proved itself."""
        return of_known if self.known else max(0.0, self.opened + SEND_SECONDS - now)


class HttpServer:
    """`routes` maps a path to its method and handler. Handlers run only for callers that hold the token."""

    def __init__(self, token: bytes, routes: Mapping[str, tuple[str, Handler]], clock: Callable[[], float]) -> None:
        self._token = token
        self._routes = routes
        self._clock = clock
        self._challenges = auth.NonceStore()
        self._next_nonces = auth.NonceStore()  # of known callers: strangers cannot crowd them out
        self._connections: dict[asyncio.StreamWriter, _Connection] = {}  # oldest first
        self._first_bodies: dict[asyncio.StreamWriter, int] = {}  # bytes that strangers may be sending; oldest first
        self._server: asyncio.AbstractServer | None = None

    async def start(self, host: str | None, port: int) -> int:
        """Listen, and return the port (for port 0)."""
        # `backlog` is also how many are accepted in one turn of the loop, before any of them can be dropped. Each takes
        # a file, and without a free one no fencing token is written.
        server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD, backlog=ACCEPTED_AT_ONCE)
        self._server = server
        lengthen_queue(server)
        return int(server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._make_room():
            writer.transport.abort()
            return
        connection = self._connections[writer] = _Connection(writer, self._clock())
        try:
            enable_keep_alive(writer)
            while True:
                upgrade = await self._exchange(reader, connection)
                if upgrade is not None:
                    await upgrade(reader, writer)
                    return
        except HttpError as error:
            self._refuse(writer, error.status)
        except asyncio.TimeoutError:
            self._refuse(writer, 408)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the caller went away, or this process does
        finally:
            self._connections.pop(writer, None)
            writer.close()

    def _make_room(self) -> bool:
        if len(self._connections) < MAX_CONNECTIONS:
            return True
        stranger = next((c for c in self._connections.values() if not c.known), None)
        if stranger is None:
            return False
        del self._connections[stranger.writer]  # at once: the next one may come before this one's task has ended
        stranger.writer.transport.abort()
        return True

    async def _exchange(self, reader: asyncio.StreamReader, connection: _Connection) -> Upgrade | None:
        """Serve one request. Raises HttpError for what ends the connection."""
        head = await asyncio.wait_for(_read_head(reader), connection.seconds_left(IDLE_SECONDS, self._clock()))
        method, target, headers = _parse_head(head)
        if method == "GET" and target == "/v1/challenge":
            if _body_length(headers) > 0:
                raise HttpError(413, "a challenge is asked for without a body")
            connection.challenges += 1
            if connection.challenges > MAX_CHALLENGES and not connection.known:
                raise HttpError(400, "so many challenges and no request")
            nonce = self._challenges.issue(self._clock())
            await self._answer(connection, HttpResponse.of({"nonce": nonce}), None)
            return None
        length = _body_length(headers)
        if not _is_signed(headers):
            raise HttpError(401, "no nonce, client or MAC")  # before any byte of the body is taken
        body = await self._read_body(reader, connection, length)
        request = self._authenticate(method, target, headers, body)
        connection.known = True
        try:
            response = await self._route(request)
        except HttpError as error:
            response = HttpResponse.of({"error": str(error)}, error.status)
        await self._answer(connection, response, request.client)
        return response.upgrade

    async def _read_body(self, reader: asyncio.StreamReader, connection: _Connection, length: int) -> bytes:
        """Read the body. The MAC covers it, so a stranger's has to be read too: strangers get little room together, and
        whoever began to send first makes room for the next."""
        if length > (MAX_BODY if connection.known else MAX_FIRST_BODY):
            raise HttpError(413, "the body is too large")
        counted = length > SMALL_BODY and not connection.known
        if counted:
            while self._first_bodies and sum(self._first_bodies.values()) + length > MAX_FIRST_BODIES:
                oldest = next(iter(self._first_bodies))
                del self._first_bodies[oldest]
                oldest.transport.abort()
            self._first_bodies[connection.writer] = length
        try:
            left = connection.seconds_left(SEND_SECONDS, self._clock())
            return await asyncio.wait_for(reader.readexactly(length), left)
        finally:
            if counted:
                self._first_bodies.pop(connection.writer, None)

    def _authenticate(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpRequest:
        nonce = headers.get(auth.NONCE_HEADER.lower(), "")
        client = headers.get(auth.CLIENT_HEADER.lower(), "")
        mac = headers.get(auth.MAC_HEADER.lower(), "")
        # Both are evaluated: whether a nonce is open must not show in the time that a wrong MAC takes.
        right = auth.macs_equal(auth.request_mac(self._token, method, target, nonce, client, body), mac)
        now = self._clock()
        age = max(self._next_nonces.age(nonce, now), self._challenges.age(nonce, now))
        fresh = self._next_nonces.take(nonce, now) or self._challenges.take(nonce, now)
        if not (right and fresh):
            raise HttpError(401, "wrong MAC or nonce")
        path, _, query = target.partition("?")
        return HttpRequest(method, target, path, dict(parse_qsl(query, max_num_fields=16)), body, nonce, client, age)

    async def _route(self, request: HttpRequest) -> HttpResponse:
        if request.path not in self._routes:
            raise HttpError(404, "no such path here")
        method, handler = self._routes[request.path]
        if method != request.method:
            raise HttpError(405, f"use {method}")
        try:
            return await handler(request)
        except ValueError as error:
            raise HttpError(400, str(error)) from error
        except (HttpError, OSError):
            raise
        except Exception as error:
            log_line(f"{request.method} {request.path}: {error!r}")
            raise HttpError(500, "this is a mistake of the agent's") from error

    async def _answer(self, connection: _Connection, response: HttpResponse, client: str | None) -> None:
        lines = [f"HTTP/1.1 {response.status} {_REASONS[response.status]}"]
        if response.upgrade:
            lines += ["Connection: Upgrade", "Upgrade: everstep"]
        else:
            lines += ["Content-Type: application/json", f"Content-Length: {len(response.body)}"]
        if client is not None:
            mac = auth.response_mac(self._token, response.status, client, response.body)
            lines.append(f"{auth.MAC_HEADER}: {mac}")
            if not response.upgrade:
                lines.append(f"{auth.NEXT_NONCE_HEADER}: {self._next_nonces.issue(self._clock())}")
        connection.writer.write("\r\n".join([*lines, "", ""]).encode() + response.body)
        await asyncio.wait_for(connection.writer.drain(), SEND_SECONDS)

    def _refuse(self, writer: asyncio.StreamWriter, status: int) -> None:
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        if not writer.is_closing():
            writer.write(head.encode())


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise HttpError(431, "the head is too large") from error


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    lines = head[:-4].decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or parts[2] != "HTTP/1.1" or not parts[0].isalpha() or not parts[1].startswith("/"):
        raise HttpError(400, "not a request of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        name = name.lower()
        # A name given twice is how two readers of one request come to see different ones.
        if not colon or not name or name != name.strip() or name in headers:
            raise HttpError(400, "malformed header")
        headers[name] = value.strip()
    return parts[0], parts[1], headers


def _body_length(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise HttpError(501, "send a Content-Length")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()) or len(length) > 12:
        raise HttpError(400, "malformed Content-Length")
    if int(length) > MAX_BODY:
        raise HttpError(413, "the body is too large")
    return int(length)


def _is_signed(headers: Mapping[str, str]) -> bool:
    """Tell whether the head has all that a signed request has. Whether it is right, only the whole request shows."""
    nonces = (headers.get(name.lower(), "") for name in (auth.NONCE_HEADER, auth.CLIENT_HEADER))
    return all(map(auth.is_nonce, nonces)) and bool(headers.get(auth.MAC_HEADER.lower()))


def lengthen_queue(server: asyncio.Server) -> None:
    """Have more connections wait in the kernel than are accepted at once.

    Args:
        server: Its `backlog` stays the number of connections that it accepts in one turn of the loop.
    """
    for listening in server.sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(WAITING_CONNECTIONS)


def enable_keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the kernel find out about a peer whose machine is gone: nothing else ends a connection that only reads."""
    sock = writer.get_extra_info("socket")
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
