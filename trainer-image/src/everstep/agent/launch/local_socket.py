"""The agent's Unix socket for its own `rank` and `rsh` commands: one JSON request a connection, JSON lines back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Callable

from everstep.agent.system.faults import name_file_in_errors

_MAX_REQUEST = 8 * 1024 * 1024  # an environment has at most 128 KiB a variable, and hardly more than that in all
# Any process of the user may connect, and say what is no request, or one whose fields are of no use.
_NO_REQUEST = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_MAX_PATH = 100  # sun_path has 108 bytes


class LocalConnection:
    """One connection. `closed` is called once, when the other end went away."""

    def __init__(self, connection: socket.socket, requested: Callable[[LocalConnection, dict[str, Any]], None]) -> None:
        self.fds: list[int] = []
        self.closed: Callable[[], None] = lambda: None
        self._socket = connection
        self._requested = requested
        self._data = b""
        self._served = False
        self._open = True
        self._loop = asyncio.get_running_loop()
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._readable)

    def send(self, answer: dict[str, Any]) -> None:
        """Send an answer. Answers are small; a peer that does not even read those is cut off."""
        if self._open:
            try:
                self._socket.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                self.close()

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self.close_fds()
        self.closed()

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def _readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 65536, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        self.fds += fds
        if not data:
            self.close()
            return
        if self._served:  # nothing more is expected: only the end
            return
        self._data += data
        line, newline, _ = self._data.partition(b"\n")
        if newline:
            self._served = True
            self._data = b""
            try:
                request = json.loads(line)
                self._requested(self, request)
            except _NO_REQUEST:
                self.close()
        elif len(self._data) > _MAX_REQUEST:
            self.close()


class LocalServer:
    """A server that listens below `scratch`, for this user only."""

    def __init__(self, scratch: Path, requested: Callable[[LocalConnection, dict[str, Any]], None]) -> None:
        self.path, self._made = scratch / "agent.sock", False
        if len(os.fsencode(self.path)) > _MAX_PATH:
            self.path, self._made = Path(tempfile.mkdtemp(prefix="everstep-")) / "agent.sock", True
        self._requested = requested
        self._peers: list[LocalConnection] = []
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with name_file_in_errors(self.path):
            self._socket.bind(str(self.path))
        self.path.chmod(0o600)
        self._socket.listen(1024)  # all ranks of a node come at once
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for peer in self._peers:
            peer.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
            if self._made:
                self.path.parent.rmdir()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._socket.accept()
            self._peers.append(LocalConnection(connection, self._requested))
