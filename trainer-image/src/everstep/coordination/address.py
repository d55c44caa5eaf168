"""Find the address under which other nodes reach this one."""

from __future__ import annotations

import contextlib
import os
import socket

# Of networks that are nowhere (RFC 5737, RFC 3849): the way there is the way to anybody outside.
_ANYBODY = ("192.0.2.1", "2001:db8::1")


def find_host_address() -> str:
    """Return the pod's address, else the one that packets to rank 0 leave from.

    Where rank 0's address is not known, that is the one that packets to any other host leave from.
    """
    given = os.environ.get("EVERSTEP_POD_IP")
    if given:
        return given
    rank0 = os.environ.get("MASTER_ADDR")
    for target in [rank0] if rank0 else _ANYBODY:
        with contextlib.suppress(OSError):  # its name may be unknown here
            for family, kind, protocol, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                    probe.connect(address)  # sends nothing
                    return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):  # no network: a name that only this machine knows, if it does
        socket.getaddrinfo(socket.gethostname(), None)
        return socket.gethostname()
    return "localhost"
