"""Reads the ranks' progress: a FIFO for each, one line of `name=value` words for each update."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from pathlib import Path
from typing import Callable

from everstep.agent.ranks.stack_dumps import StackDump
from everstep.agent.wire import rank_checkpoint
from everstep.agent.wire.rank_checkpoint import RankCheckpoint

MAX_METRICS = 32
MAX_NAME_CHARS = 64
MAX_PHASE_CHARS = 32
_CHUNK = 64 * 1024
_DRAINS = 16  # chunks, which is as much as any pipe holds
_MAX_LINE = 4096  # PIPE_BUF: longer writes may be torn by another writer, so nobody sends them on purpose
_INTERVAL = 0.1  # seconds between two reads: a rank that reports ten thousand steps a second costs no more than ten
_MAX_INTEGER = 2**53  # JSON readers keep no more


class ProgressUpdate:
    """A set of the newest values since the last one; parsing never raises."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.total: int | None = None
        self.phase = "train"
        self.metrics: dict[str, float] = {}
        self.checkpoint: RankCheckpoint | None = None
        self.stack_dump: StackDump = None

    def take(self, line: str) -> bool:
        """Parse a line. Return False when nothing in it could be used."""
        used = told = False
        phase = None
        for word in line.split():
            name, found, value = word.partition("=")
            if not found or not name or len(name) > MAX_NAME_CHARS:
                continue
            if name in ("step", "total"):
                used |= self._integer(name, value)
            elif name == "phase":
                if value.isidentifier() and len(value) <= MAX_PHASE_CHARS:
                    phase = value
            elif name == "stacks":
                told |= self._take_stacks(value)
            elif name in rank_checkpoint.NAMES:
                told |= self._checkpoint(name, value)
            else:
                used |= self._metric(name, value)
        if phase is not None or used:
            self.phase = phase or "train"  # a script may name only its other phases
        return used or told or phase is not None

    def _take_stacks(self, value: str) -> bool:
        """Take `signal:pid`, by which the rank's process dumps its stacks."""
        number, colon, pid = value.partition(":")
        if not (colon and value.isascii() and number.isdecimal() and pid.isdecimal() and len(value) <= 16):
            return False
        self.stack_dump = (int(number), int(pid))
        return True

    def _checkpoint(self, name: str, value: str) -> bool:
        taken = (self.checkpoint or RankCheckpoint()).take(name, value)
        self.checkpoint = taken or self.checkpoint
        return taken is not None

    def _integer(self, name: str, value: str) -> bool:
        # isdecimal alone would accept digits of every script, and int() has no limit on their number.
        if not (value.isascii() and value.isdecimal() and len(value) <= 16 and int(value) <= _MAX_INTEGER):
            return False
        setattr(self, name, int(value))
        return True

    def _metric(self, name: str, value: str) -> bool:
        try:
            number = float(value)
        except ValueError:
            return False
        if not math.isfinite(number):  # JSON has no word for it
            self.metrics.pop(name, None)
            return True
        if name in self.metrics or len(self.metrics) < MAX_METRICS:
            self.metrics[name] = number
        return True


class ProgressReader:
    """A reader of the FIFO of one rank. `deliver` gets the newest state, at most ten times a second."""

    def __init__(self, path: Path, deliver: Callable[[ProgressUpdate], None], complain: Callable[[str], None]) -> None:
        self.path = path
        self._deliver = deliver
        self._complain: Callable[[str], None] | None = complain
        self._update = ProgressUpdate()
        self._partial = b""
        self._paused: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.mkfifo(path, 0o622)
        path.chmod(0o622)  # whatever the umask: a rank may have dropped to another user
        # Read-write, so that the pipe has a writer all the time and never reports its end.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop.add_reader(self._fd, self._wake)

    def drain(self) -> None:
        """Take the last words of a rank that ended, and no more: a process that it left behind may go on writing."""
        for _ in range(_DRAINS):
            if not self._read():
                break

    def close(self) -> None:
        if self._fd >= 0:
            if self._paused is not None:
                self._paused.cancel()
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _wake(self) -> None:
        self._read()
        self._loop.remove_reader(self._fd)
        self._paused = self._loop.call_later(_INTERVAL, self._resume)

    def _resume(self) -> None:
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._wake)

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, _CHUNK) if self._fd >= 0 else b""
        except OSError:
            return False
        if not data:
            return False
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        if len(self._partial) > _MAX_LINE:
            lines.append(self._partial[:_MAX_LINE])
            self._partial = b""
        used = False
        for line in lines:
            if line and not self._take(line):
                self._garbage(line)
            else:
                used |= bool(line)
        if used:
            self._deliver(self._update)
        return len(data) == _CHUNK

    def _take(self, line: bytes) -> bool:
        return self._update.take(line[:_MAX_LINE].decode("utf-8", "replace"))

    def _garbage(self, line: bytes) -> None:
        """Complain once: a rank that writes garbage writes much of it."""
        if self._complain is not None:
            self._complain(f"ignored {line[:80]!r} in {self.path}: not `step=12 total=100 loss=0.5 phase=train`")
            self._complain = None
