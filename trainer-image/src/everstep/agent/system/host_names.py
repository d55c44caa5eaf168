"""Addresses of host names, asked for in a way that holds nobody up, least of all the agent's end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading

from .threads import ThreadUnavailable, in_thread

_AT_ONCE = 16  # threads that may wait for the name server; each may do so for a minute after its caller has given up
_PAUSE = 0.01  # seconds between two looks for a free one
_free = threading.BoundedSemaphore(_AT_ONCE)


def is_name(address: str) -> bool:
    """Tell whether "host:port" has a name for a host, and not an IP address."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
        return False
    return True


async def addresses_of(address: str) -> list[str]:
    """Return "ip:port" for each IP address of the host in `address`.

    Args:
        address: "host:port". An IP address needs no question.

    Raises:
        OSError: There is none by that name. Whoever asks bounds how long it may take.
    """
    host, _, port = address.rpartition(":")
    if not is_name(address):
        return [address]
    while not _free.acquire(blocking=False):  # noqa: ASYNC110 - threads free it, perhaps those of another loop
        await asyncio.sleep(_PAUSE)

    def look_up() -> list[str]:
        try:
            return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        finally:
            _free.release()

    try:
        found = await in_thread(look_up, "look-up")
    except ThreadUnavailable:
        _free.release()
        raise
    return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in found]
