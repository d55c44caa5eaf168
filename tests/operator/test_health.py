"""Health and metrics answer on whatever addresses a pod has."""

from __future__ import annotations

import socket

import aiohttp
import pytest

from everstep_operator.health import HealthServers


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
