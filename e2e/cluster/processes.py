"""Long-lived processes that outlive the command which started them, and are never mistaken for others.

A process is known by its pid, its start time and the boot it belongs to: a pid alone is soon someone else's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.state import write_atomically

# Inherited by everything a table starts; finds what was started in the instant before its record was written.
MARKER = "EVERSTEP_PROCESS_TABLE"
ENDED = ("Z", "X")


def parse_stat(stat: str) -> tuple[str, int]:
    """State and start time (in clock ticks since boot) from a ``/proc/PID/stat`` line."""
    # The command name may hold spaces and brackets; fields are counted behind its last bracket.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def read_stat(pid: int) -> tuple[str, int] | None:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Process:
    """The identity of one running program."""

    name: str
    pid: int
    ticks: int
    boot: str

    @property
    def alive(self) -> bool:
        stat = read_stat(self.pid)
        return self._is(stat) and stat is not None and stat[0] not in ENDED

    def _is(self, stat: tuple[str, int] | None) -> bool:
        return stat is not None and stat[1] == self.ticks and self.boot == boot_id()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, but only to this very process."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The handle pins the process, so the check and the signal speak of the same one.
            if self.alive:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)

    def wait_end(self, timeout: float) -> bool:
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            # A dead main thread shows as a zombie while other threads still hold ports and files; the handle waits for
            # the last of them.
            if not self._is(read_stat(self.pid)):
                return True
            poll = select.poll()  # select() knows no descriptor above 1,023
            poll.register(handle, select.POLLIN)
            return bool(poll.poll(timeout * 1000))
        finally:
            os.close(handle)


class ProcessTable:
    """The processes recorded in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, name: str, argv: Sequence[str | Path], log: Path, *, die_with_parent: bool = False) -> Process:
        """Start a program in a session of its own, with its output appended to ``log``.

        With ``die_with_parent`` the kernel kills it when the calling thread ends, however that happens.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        prefix = ["setpriv", "--pdeathsig", "KILL"] if die_with_parent else []
        with log.open("ab") as output:
            child = subprocess.Popen(
                [*prefix, *map(str, argv)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, MARKER: str(self.folder)},
            )
        self._children[child.pid] = child
        stat = read_stat(child.pid)
        if stat is None:
            raise ClusterError(f"{name} ended at once; its output is in {log}")
        process = Process(name, child.pid, stat[1], boot_id())
        write_atomically(self.folder / f"{name}.json", json.dumps(asdict(process)))
        return process

    def all(self) -> list[Process]:
        found = []
        for path in sorted(self.folder.glob("[!.]*.json")):
            with contextlib.suppress(FileNotFoundError):  # another thread or command has just stopped it
                found.append(Process(**json.loads(path.read_text())))
        return found

    def find(self, name: str) -> Process | None:
        """Return the recorded process of that name, if it still runs."""
        return next((process for process in self.all() if process.name == name and process.alive), None)

    def stop(self, names: Iterable[str] | None = None, *, grace: float = 0) -> None:
        """End the named processes (all by default): SIGTERM and ``grace`` seconds, then SIGKILL; forget them."""
        wanted = None if names is None else set(names)
        ending = [process for process in self.all() if wanted is None or process.name in wanted]
        if grace:
            for process in ending:
                process.kill(signal.SIGTERM)
            deadline = time.monotonic() + grace
            for process in ending:
                process.wait_end(max(0.0, deadline - time.monotonic()))
        for process in ending:
            process.kill()
        for process in ending:
            if not process.wait_end(10):
                raise ClusterError(f"{process.name} (pid {process.pid}) cannot be killed")
            if child := self._children.pop(process.pid, None):
                child.wait()
            (self.folder / f"{process.name}.json").unlink(missing_ok=True)

    def sweep(self) -> None:
        """Kill what carries this table's marker: also what was never recorded because its starter was killed."""
        for process in marked(str(self.folder)):
            process.kill()
            process.wait_end(10)


def marked(value: str) -> list[Process]:
    """Running processes whose environment says that they were started by the table in folder ``value``."""
    entry = f"{MARKER}={value}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        stat = read_stat(pid)
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if stat is not None and entry in environment and pid != os.getpid():
            found.append(Process(str(pid), pid, stat[1], boot_id()))
    return found
