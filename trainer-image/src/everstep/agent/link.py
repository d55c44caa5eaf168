"""The connection between a leader and an agent: authenticated frames in both directions, never blocking.

The leader dials (`dial`), the agent's server hands the accepted connection over; from then on both ends are alike.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import Any, Protocol

from . import auth
from .http import keep_alive

MAX_FRAME = 1024 * 1024
MAX_UNSENT = 4 * 1024 * 1024  # bytes that a slow peer may leave in our memory before it is dropped
DIAL_SECONDS = 5.0


class LinkClosed(Exception):
    """The link is over; the message says why."""


class Refused(Exception):
    """The agent answered a dial with something else than a link. `epoch` is the newest that it knows, if it said so."""

    def __init__(self, status: int, message: str, epoch: int | None = None) -> None:
        super().__init__(f"{status} {message}")
        self.status = status
        self.epoch = epoch


class Channel(Protocol):
    """What a node or a leader needs of a link; the leader's own node has one without a network."""

    def send(self, message: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


class Link:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, outgoing: str) -> None:
        self._reader = reader
        self._writer = writer
        self._key = key
        self._outgoing = outgoing
        self._incoming = auth.TO_LEADER if outgoing == auth.TO_AGENT else auth.TO_AGENT
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()
        self._why = ""

    def send(self, message: dict[str, Any]) -> None:
        self.send_payload(encode(message))

    def send_payload(self, payload: bytes) -> None:
        """Never blocks and never raises: a peer that does not read is dropped, and `receive` says so."""
        if self._writer.is_closing():
            return
        if len(payload) > MAX_FRAME:
            self._drop(f"a frame of {len(payload)} bytes is too large")
            return
        mac = auth.frame_mac(self._key, self._outgoing, self._sent, payload)
        self._sent += 1
        self._writer.write(mac + b" " + payload + b"\n")
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self._drop("the peer does not read")

    async def receive(self) -> dict[str, Any]:
        """The next message. Raises LinkClosed, also for a frame that is not authentic: nothing follows after it."""
        scanned = 0
        while True:
            end = self._buffer.find(b"\n", scanned)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                return self._decode(line)
            scanned = len(self._buffer)
            if scanned > MAX_FRAME + 33:
                self._drop("the peer sent a frame that is too large")
            try:
                data = await self._reader.read(256 * 1024)
            except OSError as error:
                self._drop(str(error) or type(error).__name__)
                data = b""
            if not data or self._why:
                self.close()
                raise LinkClosed(self._why or "the peer closed the connection")
            self._buffer += data

    def close(self) -> None:
        """What was sent before is still delivered."""
        self._writer.close()

    async def flushed(self) -> None:
        """Until all that was sent has left, or the peer is gone."""
        try:
            while self._writer.transport.get_write_buffer_size() and not self._writer.transport.is_closing():
                self._writer.transport.set_write_buffer_limits(high=0)
                await self._writer.drain()
        except OSError:
            pass

    def _drop(self, why: str) -> None:
        self._why = self._why or why
        self._writer.transport.abort()

    def _decode(self, line: bytes) -> dict[str, Any]:
        mac, payload = line[:32], line[33:]
        expected = auth.frame_mac(self._key, self._incoming, self._received, payload)
        if not hmac.compare_digest(mac, expected) or line[32:33] != b" ":
            self._drop("a frame was not authentic")
            raise LinkClosed(self._why)
        self._received += 1
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            self._drop("a frame was not a message")
            raise LinkClosed(self._why)
        return message


async def dial(address: str, token: bytes, *, epoch: int, index: int, uid: str) -> Link:
    """A link to the agent at `address` ("ip:port"). Raises OSError, asyncio.TimeoutError, or Refused."""
    host, _, port = address.rpartition(":")
    connect = asyncio.open_connection(host.strip("[]"), int(port))
    reader, writer = await asyncio.wait_for(connect, DIAL_SECONDS)
    try:
        body = encode({"epoch": epoch, "index": index, "uid": uid})
        return await asyncio.wait_for(_upgrade(reader, writer, address, token, body), DIAL_SECONDS)
    except BaseException:
        writer.transport.abort()
        raise


async def _upgrade(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, token: bytes, body: bytes
) -> Link:
    writer.write(f"GET /v1/challenge HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    status, _, answer = await _read_response(reader)
    nonce = _field(answer, "nonce")
    if status != 200 or not isinstance(nonce, str) or not auth.is_nonce(nonce):
        raise Refused(status, "no challenge")
    client = auth.new_nonce()
    headers = auth.request_headers(token, "POST", "/v1/link", nonce, client, body)
    lines = ["POST /v1/link HTTP/1.1", f"Host: {address}", f"Content-Length: {len(body)}"]
    lines += ["Connection: Upgrade", "Upgrade: everstep", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    status, given, answer = await _read_response(reader)
    if not auth.same(auth.response_mac(token, status, client, answer), given.get(auth.MAC_HEADER.lower(), "")):
        # Without a MAC of its own, anybody on the way could have said it: it proves nothing about epochs.
        raise Refused(status, "the answer is not authentic")
    if status != 101:
        epoch = _field(answer, "epoch")
        raise Refused(status, str(_field(answer, "error"))[:200], epoch if isinstance(epoch, int) else None)
    keep_alive(writer)
    return Link(reader, writer, auth.link_key(token, nonce, client), auth.TO_AGENT)


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head[:-4].decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = min(int(headers.get("content-length", "0")), 64 * 1024)
        return status, headers, await reader.readexactly(length)
    except (ValueError, IndexError, asyncio.LimitOverrunError, asyncio.IncompleteReadError) as error:
        raise Refused(0, "the answer is not HTTP") from error


def _field(body: bytes, name: str) -> Any:
    try:
        data = json.loads(body)
    except ValueError:
        return None
    return data.get(name) if isinstance(data, dict) else None
