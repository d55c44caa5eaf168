"""The connection between a leader and an agent: authenticated frames in both directions, never blocking.

The leader dials (`dial_agent`), the agent's server hands the accepted connection over; from then on both ends are
alike.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Mapping
from typing import Any, Protocol

from . import auth
from .http_client import AgentRequest, RequestRejected, connect_to_agent, encode_message, send_request
from .http_server import enable_keep_alive

MAX_FRAME_BYTES = 1024 * 1024
MAX_UNSENT_BYTES = 4 * 1024 * 1024  # bytes that a slow peer may leave in our memory before it is dropped


class LinkClosed(Exception):
    """The link is over; the message says why."""


class Channel(Protocol):
    """A link as a node or a leader needs it; the leader's own node has one without a network."""

    def send(self, message: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class AgentLink:
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
        self.send_payload(encode_message(message))

    def send_payload(self, payload: bytes) -> None:
        """Send a frame. This never blocks and never raises: a peer that does not read is dropped, and `receive` says
        so."""
        if self._writer.is_closing():
            return
        if len(payload) > MAX_FRAME_BYTES:
            self._drop(f"a frame of {len(payload)} bytes is too large")
            return
        mac = auth.frame_mac(self._key, self._outgoing, self._sent, payload)
        self._sent += 1
        self._writer.write(mac + b" " + payload + b"\n")
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._drop("the peer does not read")

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises LinkClosed, also for a frame that is not authentic: nothing follows after
        it."""
        scanned = 0
        while True:
            end = self._buffer.find(b"\n", scanned)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                return self._decode(line)
            scanned = len(self._buffer)
            if scanned > MAX_FRAME_BYTES + 33:
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
        """Close the link. What was sent before is still delivered."""
        self._writer.close()

    async def flushed(self) -> None:
        """Wait until all that was sent has left, or the peer is gone."""
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


async def dial_agent(
    address: str, token: bytes, *, epoch: int, index: int, uid: str, order: Mapping[str, Any] | None = None
) -> AgentLink:
    """Return a link to the agent at `address`.

    Args:
        address: The agent's "ip:port".
        token: The job's token.
        epoch: The leader's epoch.
        index: The agent's index.
        uid: UID of the job.
        order: Which of the leader's dials it is: see `DialOrder`.

    Raises:
        OSError: The agent cannot be reached.
        asyncio.TimeoutError: It does not answer in time.
        RequestRejected: It rejects the leader.
    """
    reader, writer = await connect_to_agent(address)
    try:
        about = {"epoch": epoch, "index": index, "uid": uid, **(order or {})}
        request = AgentRequest.post("/v1/link", about, "Connection: Upgrade", "Upgrade: everstep")
        answer = await send_request((reader, writer), address, token, request)
        if answer.status != 101:
            newest = answer.field("epoch")
            why = str(answer.field("error"))[:200]
            raise RequestRejected(answer.status, why, newest if isinstance(newest, int) else None)
    except BaseException:
        writer.transport.abort()
        raise
    enable_keep_alive(writer)
    return AgentLink(reader, writer, auth.link_key(token, answer.nonce, answer.client), auth.TO_AGENT)
