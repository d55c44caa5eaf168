"""Free TCP ports for servers."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return ports nobody listens on, below the range from which the kernel takes ports for outgoing connections.

    From that range a port found free now could be taken before its server starts.
    """
    lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(min(20_000, lowest_ephemeral // 2), lowest_ephemeral)
    found: list[int] = []
    while len(found) < count:
        port = random.choice(candidates)
        if port not in found and _is_free(address, port):
            found.append(port)
    return found


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
