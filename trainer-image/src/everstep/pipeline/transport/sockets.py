"""The connections of this process's groups, so that they can be shut from another thread.

A thread that waits in gloo holds out until the group's timeout, whatever is done to the group: only the end of its
connection wakes it. Which connections are a group's is seen by what is there after it was made and was not before.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_HERE = Path("/proc/self/fd")  # Linux; elsewhere nothing is found, and waits end with their timeouts


class Sockets:
    """Made by `watch`."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}  # by what the kernel calls them, since numbers are used again

    @classmethod
    @contextlib.contextmanager
    def watch(cls) -> Iterator[Sockets]:
        """The sockets that are opened meanwhile by any thread of this process, and are still there at the end."""
        sockets = cls()
        with sockets.watch_more():
            yield sockets

    @contextlib.contextmanager
    def watch_more(self) -> Iterator[None]:
        """Adds those that are opened meanwhile."""
        before = _sockets()
        yield
        self._found |= {name: number for name, number in _sockets().items() if name not in before}

    def address(self) -> str | None:
        """Of this process, as the other ends of these connections see it; None if there is none."""
        now = _sockets()
        for name, number in self._found.items():
            if now.get(name) == number:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()  # only of what is connected
                        return str(connection.getsockname()[0])
        return None

    def shut(self) -> None:
        """Ends the connections; whoever waits for one of them, on either side, gets an error."""
        now = _sockets()
        for name, number in self._found.items():
            if now.get(name) == number:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    # A thread of gloo that accepts would end the whole process.
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[str, int]:
    found = {}
    if _HERE.is_dir():
        for entry in _HERE.iterdir():
            with contextlib.suppress(OSError):
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    found[name] = int(entry.name)
    return found
