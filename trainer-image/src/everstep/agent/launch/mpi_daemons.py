"""Daemons that an MPI launcher runs on this node (orted, prted, hydra_pmi_proxy)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import Callable

from everstep.agent.ranks.events import DaemonExited, DaemonOutput, Event
from everstep.agent.system.processes import ChildProcess, ChildProcesses

_MAX_OUTPUT = 1024 * 1024  # bytes a daemon; they say something only when something is wrong
_CHUNK = 16 * 1024

OutputCallback = Callable[[str, str, bytes], None]


class _Daemon:
    def __init__(self, name: str, output: OutputCallback, ended: Callable[[int], None]) -> None:
        self.process: ChildProcess
        self._name, self._output, self._ended = name, output, ended
        self._budget = _MAX_OUTPUT
        self._loop = asyncio.get_running_loop()
        self._pipes: dict[int, str] = {}

    def start(self, processes: ChildProcesses, argv: list[str], env: Mapping[str, str]) -> None:
        inner = [self._pipe("stdout"), self._pipe("stderr")]
        try:
            self.process = processes.start(argv, env, stdout=inner[0], stderr=inner[1], on_exit=self._exited)
        except (OSError, ValueError) as error:
            self._output(self._name, "stderr", f"{argv[0]}: {error}\n".encode())
            self.close()
            self._ended(127)
        finally:
            for fd in inner:
                os.close(fd)

    def close(self) -> None:
        for fd in list(self._pipes):
            self._forget(fd)

    def _pipe(self, stream: str) -> int:
        outer, inner = os.pipe()
        os.set_blocking(outer, False)
        self._pipes[outer] = stream
        self._loop.add_reader(outer, self._read, outer)
        return inner

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._forget(fd)
            return False
        if self._budget > 0:
            self._budget -= len(data)
            self._output(self._name, self._pipes[fd], data)
        return True

    def _forget(self, fd: int) -> None:
        del self._pipes[fd]
        self._loop.remove_reader(fd)
        os.close(fd)

    def _exited(self, process: ChildProcess) -> None:
        for fd in list(self._pipes):
            while self._budget > 0 and self._read(fd):
                pass
        self.close()
        self._ended(process.exit_code)


class Daemons:
    """A table of the daemons on this node, by the id that the launcher's side gave them."""

    def __init__(self, processes: ChildProcesses, emit: Callable[[Event], None]) -> None:
        self._processes = processes
        self._emit = emit
        self._daemons: dict[str, _Daemon] = {}

    def start(self, name: str, argv: list[str], env: Mapping[str, str]) -> None:
        """Start a daemon for another node's launcher: output and exit are events."""

        def output(name: str, stream: str, data: bytes) -> None:
            self._emit(DaemonOutput(name, stream, data))

        self._start(name, argv, env, output, lambda code: self._emit(DaemonExited(name, code)))

    def run(self, name: str, argv: list[str], env: Mapping[str, str], output: OutputCallback) -> asyncio.Future[int]:
        """Run a daemon for this node's own launcher, and return a future of its exit code."""
        code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def ended(value: int) -> None:
            with contextlib.suppress(asyncio.InvalidStateError):
                code.set_result(value)

        self._start(name, argv, env, output, ended)
        return code

    def kill(self, name: str) -> None:
        daemon = self._daemons.get(name)
        if daemon is not None:
            self._processes.kill_group(daemon.process)

    def close(self) -> None:
        """Close the pipes after all processes have been killed."""
        for daemon in self._daemons.values():
            daemon.close()
        self._daemons = {}

    def _start(
        self, name: str, argv: list[str], env: Mapping[str, str], output: OutputCallback, ended: Callable[[int], None]
    ) -> None:
        def gone(code: int) -> None:
            self._daemons.pop(name, None)
            ended(code)

        daemon = self._daemons[name] = _Daemon(name, output, gone)
        daemon.start(self._processes, argv, env)
