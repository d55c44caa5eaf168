"""The connections of this process's groups, so that they can be shut from another thread.

A thread that waits in gloo holds out until the group's timeout, whatever is done to the group: only the end of its
connection wakes it. Which connections are a group's is seen by what is there after it was made and was not before, and
by what other processes of the job have seen of it: a connection of another thread, as to a store, leads elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

_HERE = Path("/proc/self/fd")  # Linux; elsewhere nothing is found, and waits end with their timeouts


class GroupConnections:
    """Made by `watch`. Between `watch` or `watch_more` and `settle`, all that was opened counts."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}  # by what the kernel calls them, since numbers are used again
        self._unsettled: set[str] = set()

    @classmethod
    @contextlib.contextmanager
    def watch(cls) -> Iterator[GroupConnections]:
        """The sockets that are opened meanwhile by any thread of this process, and are still there at the end."""
        sockets = cls()
        with sockets.watch_more():
            yield sockets

    @contextlib.contextmanager
    def watch_more(self) -> Iterator[None]:
        """Add the sockets that are opened meanwhile."""
        before = _list_sockets()
        yield
        opened = {name: number for name, number in _list_sockets().items() if name not in before}
        self._unsettled |= opened.keys()
        self._found |= opened

    def settle(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Forget what does not lead to another process of the job. Collective.

        Args:
            gather: Those of all processes.
        """
        ends = {name: _describe_ends(self._found[name]) for name in self._unsettled}
        every = Counter(each for seen in gather([each for each in ends.values() if each]) for each in set(seen))
        between = {name for name, each in ends.items() if each and every[each] > 1}
        # Where addresses are translated on the way nobody sees the other's end: then all that was opened counts.
        if between:
            self._found = {name: number for name, number in self._found.items() if name not in ends or name in between}
        self._unsettled.clear()

    def address(self) -> str | None:
        """Return the address of this process, as the other ends of these connections see it; None if there is none."""
        now = _list_sockets()
        for name, number in self._found.items():
            if now.get(name) == number:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()  # only of what is connected
                        return str(connection.getsockname()[0])
        return None

    def shut(self) -> None:
        """End the connections; every process that waits for one of them, on either side, gets an error."""
        now = _list_sockets()
        for name, number in self._found.items():
            if now.get(name) == number:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    # A thread of gloo that accepts would end the whole process.
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)


def _describe_ends(number: int) -> str:
    """Describe both ends of a connection, in the same way at either end; empty for anything else."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            ends = (connection.getsockname(), connection.getpeername())
            # One end may know the address of IPv4 as one of IPv6, and the name of a link is each machine's own.
            plain = [(host.removeprefix("::ffff:").partition("%")[0], port) for host, port, *_ in ends]
            return " ".join(sorted(f"{host} {port}" for host, port in plain))
    return ""


def _list_sockets() -> dict[str, int]:
    found = {}
    if _HERE.is_dir():
        for entry in _HERE.iterdir():
            with contextlib.suppress(OSError):
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    found[name] = int(entry.name)
    return found
