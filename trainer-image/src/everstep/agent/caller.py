"""The client side of http.py: one authenticated request to an agent, and its answer. It blocks nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from . import auth
from .names import addresses_of

SECONDS = 5.0  # to connect, and again to answer
MAX_ANSWER = 64 * 1024

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Refused(Exception):
    """An answer that rejects the request, or that is not from the agent that was asked.

    `epoch` is the newest leader's that the agent knows, if it said so.
    """

    def __init__(self, status: int, message: str, epoch: int | None = None) -> None:
        super().__init__(f"{status} {message}")
        self.status = status
        self.epoch = epoch


@dataclass(frozen=True)
class Answer:
    """An authentic answer to an authenticated request."""

    status: int
    body: bytes
    nonce: str  # of this exchange
    client: str

    def field(self, name: str) -> Any:
        return _field(self.body, name)


async def connect(address: str) -> Streams:
    """`address` is "ip:port" or "name:port". Raises OSError or asyncio.TimeoutError."""
    return await asyncio.wait_for(_connect(address), SECONDS)


async def ask(streams: Streams, address: str, token: bytes, target: str, data: Any, *headers: str) -> Answer:
    """Send a POST with a challenge of its own.

    Args:
        streams: An open connection.
        address: The agent's "ip:port".
        token: The job's token.
        target: The path.
        data: The body, as JSON.
        headers: Whole header lines.

    Raises:
        Refused: The answer proves nothing.
        OSError: The connection broke.
        asyncio.TimeoutError: No answer came in time.
    """
    return await asyncio.wait_for(_ask(streams, address, token, target, encode(data), headers), SECONDS)


async def post(address: str, token: bytes, target: str, data: Any) -> Answer:
    """Send one request on a connection that ends with it; otherwise as `ask`."""
    async with _closing(await connect(address)) as streams:
        return await ask(streams, address, token, target, data)


def encode(message: Any) -> bytes:
    """Return `message` as JSON in UTF-8: escapes take up to three times as much, and frames are bounded."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


@contextlib.asynccontextmanager
async def _closing(streams: Streams) -> AsyncIterator[Streams]:
    try:
        yield streams
    finally:
        streams[1].transport.abort()


async def _connect(address: str) -> Streams:
    failed: OSError | None = None
    for found in await addresses_of(address):
        host, _, port = found.rpartition(":")
        try:
            return await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError as error:
            failed = error
    raise failed or OSError(f"{address}: no address")


async def _ask(
    streams: Streams, address: str, token: bytes, target: str, body: bytes, headers: tuple[str, ...]
) -> Answer:
    reader, writer = streams
    writer.write(f"GET /v1/challenge HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    status, _, answer = await _read(reader)
    nonce = _field(answer, "nonce")
    if status != 200 or not isinstance(nonce, str) or not auth.is_nonce(nonce):
        raise Refused(status, "no challenge")
    client = auth.new_nonce()
    proof = auth.request_headers(token, "POST", target, nonce, client, body)
    lines = [f"POST {target} HTTP/1.1", f"Host: {address}", f"Content-Length: {len(body)}", *headers]
    lines += [*(f"{k}: {v}" for k, v in proof.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    status, given, answer = await _read(reader)
    if not auth.same(auth.response_mac(token, status, client, answer), given.get(auth.MAC_HEADER.lower(), "")):
        # Without a MAC of its own, anybody on the way could have said it: it proves nothing about epochs.
        raise Refused(status, "the answer is not authentic")
    return Answer(status, answer, nonce, client)


async def _read(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head[:-4].decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = min(int(headers.get("content-length", "0")), MAX_ANSWER)
        return status, headers, await reader.readexactly(length)
    except (ValueError, IndexError, asyncio.LimitOverrunError, asyncio.IncompleteReadError) as error:
        raise Refused(0, "the answer is not HTTP") from error


def _field(body: bytes, name: str) -> Any:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return data.get(name) if isinstance(data, dict) else None
