"""Health and metrics answer on whatever addresses a pod has."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import aiohttp
import pytest

from everstep_operator import health, public_server
from everstep_operator.health import HealthServers
from tests.integration.world import until


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def _read(host: str, bind: str) -> str:
    servers = HealthServers(lambda: None, lambda: "not yet", lambda: None)
    await servers.start(bind, 0, 0)
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{host}:{servers.health_port}/readyz", timeout=aiohttp.ClientTimeout(30)) as answer,
        ):
            return await answer.text()
    finally:
        await servers.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_they_are_reached_by_addresses_of_both_families(host: str) -> None:
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    assert await _read(host, "") == "not yet"


@pytest.mark.parametrize("error", [OSError(97, "Address family not supported"), ValueError("no dual stack")])
async def test_a_kernel_without_ipv6_is_no_obstacle(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.create_server

    def create(address: tuple[str, int], **options: object) -> socket.socket:
        if options.get("family") == socket.AF_INET6:
            raise error
        return real(address, family=socket.AF_INET)

    monkeypatch.setattr(socket, "create_server", create)
    assert await _read("127.0.0.1", "") == "not yet"


async def test_an_address_is_taken_as_it_is_given() -> None:
    assert await _read("127.0.0.1", "127.0.0.1") == "not yet"


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nX: "])
async def test_strangers_that_stay_keep_no_probe_away(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would otherwise take all the files that the operator may have open, those of its requests too."""
    monkeypatch.setattr(public_server, "SECONDS", 3600.0)
    servers = HealthServers(lambda: None, lambda: None, lambda: None)
    await servers.start("127.0.0.1", 0, -1)
    strangers: list[socket.socket] = []
    most = public_server.MAX_CONNECTIONS
    try:
        for _ in range(10 * most):
            strangers.append(socket.socket())
            strangers[-1].setblocking(False)
            strangers[-1].connect_ex(("127.0.0.1", servers.health_port))
            await asyncio.sleep(0)
            with contextlib.suppress(OSError):
                strangers[-1].send(said)

        async def have_made_room() -> bool:
            return sum(map(_is_closed, strangers)) >= 9 * most

        await until(have_made_room, "the surplus is dropped")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{servers.health_port}/healthz") as answer,
        ):
            assert await answer.text() == "ok"
    finally:
        for stranger in strangers:
            stranger.close()
        await servers.stop()


async def test_strangers_that_take_nothing_of_an_answer_keep_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that a transport's buffer held was taken for sent, and the file stayed open for as long as they did."""
    monkeypatch.setattr(public_server, "SECONDS", 1.0)
    answer = public_server.PublicAnswer(200, b"everstep_jobs 1\n" * 3750)  # as long as the metrics of an operator
    server = public_server.PublicServer({"/metrics": lambda: answer})
    port = await server.start(socket.create_server(("127.0.0.1", 0)))
    before, strangers = _count_files(), []
    try:
        for _ in range(3 * public_server.MAX_CONNECTIONS):
            stranger = socket.socket()
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 88)  # else the kernel takes it all at once
            stranger.setblocking(False)
            await asyncio.get_running_loop().sock_connect(stranger, ("127.0.0.1", port))
            stranger.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            strangers.append(stranger)

        async def are_dropped() -> bool:
            return _count_files() - before == len(strangers)  # their own ends

        await until(are_dropped, "the server has closed all of its ends")
    finally:
        for stranger in strangers:
            stranger.close()
        await server.stop()


@pytest.mark.parametrize(("seconds", "times"), [(3600.0, 1), (0.0, 5)])
async def test_who_asks_for_metrics_again_and_again_gets_the_same_for_a_while(
    seconds: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any pod may ask. To render them for each that does so kept the event loop busy with nothing else."""
    monkeypatch.setattr(health, "RENDER_SECONDS", seconds)
    measured: list[None] = []
    servers = HealthServers(lambda: None, lambda: None, lambda: measured.append(None))
    await servers.start("127.0.0.1", 0, 0)
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(5):
                async with session.get(f"http://127.0.0.1:{servers.metrics_port}/metrics") as answer:
                    assert "everstep_" in await answer.text()
    finally:
        await servers.stop()
    assert len(measured) == times


def _count_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", 200),
        (b"HEAD /readyz?verbose HTTP/1.0\r\n\r\n", 500),
        (b"POST /healthz HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 404),
        (b"\x16\x03\x01\x00\xff\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000, 431),
    ],
)
async def test_each_request_gets_one_answer(said: bytes, status: int) -> None:
    servers = HealthServers(lambda: None, lambda: "not yet", lambda: None)
    await servers.start("127.0.0.1", 0, -1)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", servers.health_port)
        writer.write(said)
        async with asyncio.timeout(60):
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # what it sent was not read to its end
                while data := await reader.read(1000):
                    answer += data
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"not yet" not in answer
        writer.close()
    finally:
        await servers.stop()


def _is_closed(connection: socket.socket) -> bool:
    """Tell whether the other end has closed a connection on which it says nothing."""
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
