"""Strangers who come to an agent's port by the hundred, all at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.agent.wire import auth, http_server
from everstep.cli.leader_client import LeaderClient

from .fakes import TOKEN, Agent, gang, leader_of, until


@pytest.fixture
async def agents(tmp_path: Path) -> AsyncIterator[list[Agent]]:
    async with gang(tmp_path, 2) as agents:
        yield agents


async def test_strangers_who_come_at_once_are_no_more_than_those_who_come_one_by_one(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would otherwise take all the files that an agent may have open, and it could not write a fencing token."""
    monkeypatch.setattr(http_server, "SEND_SECONDS", 3600.0)
    strangers, most = [], http_server.MAX_CONNECTIONS
    await until(lambda: leader_of(agents).phase == "running", "the job runs")
    host, _, port = agents[0].address.rpartition(":")
    try:
        for _ in range(4 * most):
            strangers.append(socket.socket())
            strangers[-1].setblocking(False)
            strangers[-1].connect_ex((host, int(port)))

        def count_open() -> int:
            return sum(not _is_closed(stranger) for stranger in strangers)

        await until(lambda: count_open() <= most, "the surplus is dropped")
        client = LeaderClient(agents[0].address, TOKEN)
        assert (await asyncio.to_thread(client.state))["phase"] == "running"
    finally:
        for stranger in strangers:
            stranger.close()


async def test_strangers_who_come_at_once_leave_an_agent_files_to_open(agents: list[Agent]) -> None:
    """A few of them are accepted at a time; the others wait in the kernel."""
    host, _, port = agents[0].address.rpartition(":")
    strangers, most = [], http_server.MAX_CONNECTIONS
    try:
        for _ in range(4 * most):
            strangers.append(socket.socket())
            strangers[-1].setblocking(False)
            strangers[-1].connect_ex((host, int(port)))
        before = _count_open_files()
        while sum(map(_is_closed, strangers)) < 3 * most:
            assert _count_open_files() - before < 2 * most
            await asyncio.sleep(0)
    finally:
        for stranger in strangers:
            stranger.close()


async def test_a_stranger_leaves_however_often_it_asks_for_a_challenge(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is that of the connection, not of each request."""
    monkeypatch.setattr(http_server, "SEND_SECONDS", 1.0)
    monkeypatch.setattr(http_server, "MAX_CHALLENGES", 1_000_000)
    host, _, port = agents[0].address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def ask_for_ever() -> None:
        while True:
            writer.write(b"GET /v1/challenge HTTP/1.1\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"HTTP/1.1 408"):
                return
            await reader.readuntil(b"}")
            await asyncio.sleep(0.1)

    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await asyncio.wait_for(ask_for_ever(), 60)
    writer.close()


async def test_a_stranger_gets_few_challenges_and_a_known_caller_as_many_as_it_wants(agents: list[Agent]) -> None:
    host, _, port = agents[0].address.rpartition(":")
    ask = b"GET /v1/challenge HTTP/1.1\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(ask * 1000)
    heard = await asyncio.wait_for(reader.read(), 60)
    assert heard.count(b"HTTP/1.1 200") == http_server.MAX_CHALLENGES
    writer.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(ask)
    await reader.readuntil(b"\r\n\r\n")
    nonce = json.loads(await reader.readuntil(b"}"))["nonce"]
    proof = auth.request_headers(TOKEN, "GET", "/v1/state", nonce, auth.new_nonce(), b"")
    head = "".join(f"{name}: {value}\r\n" for name, value in proof.items())
    writer.write(f"GET /v1/state HTTP/1.1\r\n{head}\r\n".encode() + ask * 100)
    for _ in range(101):
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).startswith(b"HTTP/1.1 200")
        await reader.readuntil(b"}")
    writer.close()


def _count_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _is_closed(connection: socket.socket) -> bool:
    """Tell whether the other end has closed a connection on which it says nothing."""
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
