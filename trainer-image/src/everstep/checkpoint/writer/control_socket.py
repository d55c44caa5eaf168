"""The socket by which ranks reach their node's writer; made anew where somebody has removed it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from everstep.checkpoint.slots.own_files import SOCKET
from everstep.checkpoint.writer import control

_log = logging.getLogger("everstep.checkpoint.writer")

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ControlSocket:
    """A socket in a slots' directory that only our user may open.

    Args:
        directory: The slots' directory, which this process has locked.
        accept: Serves one connection.
    """

    def __init__(self, directory: Path, accept: Accept) -> None:
        self._path = directory / SOCKET
        self._accept = accept
        self._server: asyncio.Server | None = None
        self._file: os.stat_result | None = None

    async def open(self) -> None:
        """Listen, in place of whatever is there: of a writer before this one."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with control.shorten_socket_path(self._path) as name:
            listener.bind(name)
        self._path.chmod(0o600)
        self._file = self._path.stat()
        self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=control.MAX_LINE)

    async def open_if_removed(self) -> None:
        """Listen anew where nobody could connect any more: who comes would wait for this process in vain.

        Connections that there are go on.
        """
        try:
            is_there = self._file is not None and os.path.samestat(self._file, self._path.stat())
        except FileNotFoundError:
            is_there = False
        if not is_there:
            _log.warning("%s was removed by another process: it is made anew", self._path)
            self.close()
            await self.open()

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()
