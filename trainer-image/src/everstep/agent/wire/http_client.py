"""The client side of http_server.py: one authenticated request to an agent, and its answer. It blocks nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from everstep.agent.system.host_names import addresses_of

from . import auth

REQUEST_TIMEOUT_SECONDS = 5.0  # to connect, and again to answer
MAX_ANSWER_BYTES = 64 * 1024

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AgentRequest(NamedTuple):
    """A request, and the bounds of its answer.

    Attributes:
        method: The HTTP method.
        target: The path with its query.
        body: JSON, or nothing.
        headers: Whole header lines.
        timeout_seconds: Seconds until the answer must be complete.
        max_answer_bytes: The longest answer that is read; a longer one is rejected.
    """

    method: str
    target: str
    body: bytes = b""
    headers: tuple[str, ...] = ()
    timeout_seconds: float = REQUEST_TIMEOUT_SECONDS
    max_answer_bytes: int = MAX_ANSWER_BYTES

    @classmethod
    def post(cls, target: str, data: Any, *headers: str) -> AgentRequest:
        """Make a POST request with `data` as JSON."""
        return cls("POST", target, encode_message(data), headers)


class RequestRejected(Exception):
    """An answer that rejects the request, or that is not from the agent that was asked.

    `epoch` is the newest leader's that the agent knows, if it said so.
    """

    def __init__(self, status: int, message: str, epoch: int | None = None) -> None:
        super().__init__(f"{status} {message}")
        self.status = status
        self.epoch = epoch


class AgentAnswer(NamedTuple):
    """An authentic answer to an authenticated request."""

    status: int
    body: bytes
    nonce: str  # of this exchange
    client: str

    def field(self, name: str) -> Any:
        """Return a field of the JSON object in the body; None if there is none."""
        return _read_json_field(self.body, name)


async def connect_to_agent(address: str) -> Streams:
    """Open a connection to an agent.

    Args:
        address: "ip:port" or "name:port".

    Raises:
        OSError: It cannot be reached.
        asyncio.TimeoutError: It did not answer in time.
    """
    return await asyncio.wait_for(_open_connection(address), REQUEST_TIMEOUT_SECONDS)


async def send_request(streams: Streams, address: str, token: bytes, request: AgentRequest) -> AgentAnswer:
    """Send a request with a challenge of its own.

    Args:
        streams: An open connection.
        address: The agent's "ip:port".
        token: The job's token.
        request: What is sent.

    Raises:
        RequestRejected: The answer proves nothing.
        OSError: The connection broke.
        asyncio.TimeoutError: No answer came in time.
    """
    return await asyncio.wait_for(_exchange_messages(streams, address, token, request), request.timeout_seconds)


async def send_request_once(address: str, token: bytes, request: AgentRequest) -> AgentAnswer:
    """Send a request on a connection that ends with it; otherwise as `send_request`."""
    async with _closing_connection(await connect_to_agent(address)) as streams:
        return await send_request(streams, address, token, request)


def encode_message(message: Any) -> bytes:
    """Return `message` as JSON in UTF-8: escapes take up to three times as much, and frames are bounded."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


@contextlib.asynccontextmanager
async def _closing_connection(streams: Streams) -> AsyncIterator[Streams]:
    try:
        yield streams
    finally:
        streams[1].transport.abort()


async def _open_connection(address: str) -> Streams:
    failed: OSError | None = None
    for found in await addresses_of(address):
        host, _, port = found.rpartition(":")
        try:
            return await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError as error:
            failed = error
    raise failed or OSError(f"{address}: no address")


async def _exchange_messages(streams: Streams, address: str, token: bytes, request: AgentRequest) -> AgentAnswer:
    reader, writer = streams
    writer.write(f"GET /v1/challenge HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    status, _, answer = await read_response(reader, MAX_ANSWER_BYTES)
    nonce = _read_json_field(answer, "nonce")
    if status != 200 or not isinstance(nonce, str) or not auth.is_nonce(nonce):
        raise RequestRejected(status, "no challenge")
    client, body = auth.new_nonce(), request.body
    proof = auth.request_headers(token, request.method, request.target, nonce, client, body)
    lines = [f"{request.method} {request.target} HTTP/1.1", f"Host: {address}", f"Content-Length: {len(body)}"]
    lines += [*request.headers, *(f"{k}: {v}" for k, v in proof.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    status, given, answer = await read_response(reader, request.max_answer_bytes)
    if not auth.macs_equal(auth.response_mac(token, status, client, answer), given.get(auth.MAC_HEADER.lower(), "")):
        # Without a MAC of its own, anybody on the way could have said it: it proves nothing about epochs.
        raise RequestRejected(status, "the answer is not authentic")
    return AgentAnswer(status, answer, nonce, client)


async def read_response(reader: asyncio.StreamReader, max_bytes: int) -> tuple[int, dict[str, str], bytes]:
    """Read one response, which must be what an agent sends: a head, and a body whose length is in it.

    Args:
        reader: Its limit bounds the head.
        max_bytes: The longest body that is read.

    Returns:
        The status, the headers by their names in lower case, and the body.

    Raises:
        RequestRejected: It is no such response, or is too long; nothing more of it was read.
        ConnectionResetError: The connection ended before the response did.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status, headers, length = parse_response_head(head, max_bytes)
        return status, headers, await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the connection was closed before the answer was complete") from error
    except asyncio.LimitOverrunError as error:
        raise RequestRejected(0, "the answer is not HTTP") from error


def parse_response_head(head: bytes, max_bytes: int) -> tuple[int, dict[str, str], int]:
    """Parse the head of a response.

    Args:
        head: The head, with the empty line at its end.
        max_bytes: The longest body that is read.

    Returns:
        The status, the headers by their names in lower case, and the length of the body.

    Raises:
        RequestRejected: It is not what an agent sends, or announces a longer body.
    """
    try:
        lines = head[:-4].decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length", "0"))
    except (ValueError, IndexError) as error:
        raise RequestRejected(0, "the answer is not HTTP") from error
    if not 0 <= length <= max_bytes:
        raise RequestRejected(status, f"an answer of {length} bytes, more than {max_bytes}")
    return status, headers, length


def _read_json_field(body: bytes, name: str) -> Any:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return data.get(name) if isinstance(data, dict) else None
