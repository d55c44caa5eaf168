"""Starts, reaps and ends processes: all of them, also those that nobody here started."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Callable

from .threads import in_thread_if_possible

_SHELLS = frozenset(("sh", "bash", "dash", "ash", "busybox", "zsh", "ksh"))
_MAX_SEEN = 4096  # PIDs that are remembered; a node hardly runs more processes at a time
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


class ChildProcess:
    """A child process. `status` is what waitpid said, None while it runs."""

    def __init__(self, pid: int, on_exit: Callable[[ChildProcess], None] | None) -> None:
        self.pid = pid
        self.status: int | None = None
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._on_exit = on_exit

    @property
    def signal(self) -> int | None:
        return os.WTERMSIG(self.status) if self.status is not None and os.WIFSIGNALED(self.status) else None

    @property
    def exit_code(self) -> int:
        """Return the exit code as a shell would say it; only after the exit."""
        assert self.status is not None
        return 128 + os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else os.WEXITSTATUS(self.status)

    def _ended(self, status: int) -> None:
        self.status = status
        if not self.exited.done():
            self.exited.set_result(status)
        if self._on_exit is not None:
            self._on_exit(self)


class ChildProcesses:
    """A table of the children of this process. It reaps *every* child, so nothing else here may wait for one (asyncio's
    subprocesses would lose their exits)."""

    def __init__(self, owns_pod: bool) -> None:
        self._owns_pod = owns_pod and os.getpid() == 1  # kill(-1) from any other PID would end the machine's session
        self._has_guests = False  # another container of the pod shows its processes here, as `kubectl debug --target`
        self._children: dict[int, ChildProcess] = {}
        self._seen: dict[int, None] = {}  # PIDs of those that were seen, reaped or killed here; oldest first
        self._prctl = None if self._owns_pod else _load_prctl()
        if self._prctl is not None:
            # Orphans of the ranks become ours instead of init's, else a daemonised one could never be found again.
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)

    def close(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
        affinity: set[int] | None = None,
        on_exit: Callable[[ChildProcess], None] | None = None,
    ) -> ChildProcess:
        """Start a child in a session of its own (no terminal, its process group can be signalled as one).

        An exit cannot be lost: children are reaped by a callback of the loop, which cannot run before this returns.

        Args:
            argv: The program and its arguments.
            env: Its whole environment.
            stdout: Descriptor of its standard output.
            stderr: Descriptor of its standard error.
            cwd: Its working folder; None: this process's.
            pass_fds: Further descriptors that it inherits.
            affinity: CPUs that it may use; None: all.
            on_exit: Called once it has ended.

        Raises:
            OSError: It cannot be executed.
        """
        popen = subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=self._die_with_parent(),
        )
        popen.returncode = 0  # Popen must neither wait for it nor warn: the reaper does
        if affinity:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(popen.pid, affinity)
        child = self._children[popen.pid] = ChildProcess(popen.pid, on_exit)
        return child

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        timeout: float,
        errors: bool = True,
        limit: int = 1024 * 1024,
    ) -> tuple[int, str] | None:
        """Run a short helper.

        Args:
            argv: The program and its arguments.
            env: Its whole environment.
            timeout: Seconds after which it is killed.
            errors: Whether what it writes to stderr belongs to its output.
            limit: Bytes of output that are kept; it may write more.

        Returns:
            Its exit code and output, or None when it took longer than `timeout`.
        """
        out, inner = os.pipe()
        try:
            process = self.start(argv, env, stdout=inner, stderr=inner if errors else subprocess.DEVNULL)
        except BaseException:
            os.close(out)
            raise
        finally:
            os.close(inner)
        os.set_blocking(out, False)
        loop, output = asyncio.get_running_loop(), bytearray()

        def read() -> bool:
            try:
                data = os.read(out, 65536)
            except BlockingIOError:
                return False
            if not data:
                loop.remove_reader(out)
            output.extend(data[: limit - len(output)])
            return bool(data)

        loop.add_reader(out, read)  # while it runs: a full pipe would stop it
        try:
            await asyncio.wait_for(asyncio.shield(process.exited), timeout)
            while len(output) < limit and read():
                pass
            return process.exit_code, output.decode(errors="replace")
        except asyncio.TimeoutError:
            return None
        finally:
            loop.remove_reader(out)
            os.close(out)
            self.kill_group(process)

    def reap(self) -> None:
        """Reap all children that have ended: one SIGCHLD may stand for many exits, and many of our zombies were never
        our children."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._remember(pid)
            child = self._children.pop(pid, None)
            if child is not None:
                child._ended(status)

    async def forward(self, processes: Iterable[ChildProcess], signum: int) -> set[int]:
        """Send a signal to processes and, where one passes it on to nobody, to what it runs.

        Shells pass no signals on, and a launcher without a handler (`accelerate launch` of one process) cannot: it dies
        at once, and what it ran goes on, to which a stop is told as well. Not to the whole group: data loader workers
        that die of a TERM would fail the checkpoint that their parent, which has a handler, writes because of it.

        Args:
            processes: Some that were started here.
            signum: The signal.

        Returns:
            The PIDs of those that heard it.
        """
        first = {process.pid: process for process in processes if process.status is None}
        heard = await in_thread_if_possible(lambda: _list_signal_targets(first, signum), "look-at-processes")
        for pid in heard:  # all in one go: nobody who cancels this may send it to some of them again
            if pid not in first or first[pid].status is None:
                _kill_process(pid, signum)
        return set(heard)

    def living(self, pids: Iterable[int]) -> set[int]:
        """Return those of `pids` that have not ended. Orphans are ours to reap, so what is left as a zombie is not
        ours."""
        return {pid for pid in pids if (_read_stat(pid) or ("", "Z", 0))[1] not in ("Z", "X")}

    def forget_seen(self) -> None:
        """Start to remember anew: PIDs are used again."""
        self._seen = {}

    async def note_living(self) -> None:
        """Remember the processes that run now: what a launcher starts and reaps itself is never seen to end here."""
        for pid in await in_thread_if_possible(self._others, "look-at-processes"):
            self._remember(pid)

    def has_run_here(self, pid: int) -> bool:
        """Tell whether a process with this PID was seen, reaped or killed here."""
        return pid in self._seen

    def _remember(self, pid: int) -> None:
        self._seen[pid] = None
        if len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]

    def kill_group(self, process: ChildProcess) -> None:
        """Send KILL, at once, to the process and those of its group."""
        if process.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    async def kill_all(self, deadline: float) -> str | None:
        """Send KILL to every process of the container but this one (outside of a pod: to all descendants), again and
        again until none is left, since a process may fork while the list is being read. Return what is left at
        `deadline` (monotonic)."""
        pause = 0.001
        while True:
            left = await in_thread_if_possible(self._others, "look-at-processes")  # there may be thousands
            if not left:
                return None
            if time.monotonic() > deadline:
                return "still alive after SIGKILL: " + ", ".join(_describe_process(pid) for pid in left[:8])
            if self._owns_pod and not self._has_guests:
                _kill_process(-1, signal.SIGKILL)  # also those that are forked at this moment
            else:
                for pid in left:
                    _kill_process(pid, signal.SIGKILL)
            for pid in left:
                self._remember(pid)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.1)
            self.reap()

    def _others(self) -> list[int]:
        """Living processes that must go. Zombies of other parents count too: they hold GPU and memory contexts until
        their last thread is gone, and vanish with their parents."""
        me = os.getpid()
        if self._owns_pod:
            parents = _read_parents()
            ours = [pid for pid in parents if pid != me and _is_in_our_container(pid)]
            self._has_guests = len(ours) < len(parents) - (me in parents)
            return ours
        children = _list_children()
        found, queue = [], [me]
        while queue:
            below = children.get(queue.pop(), [])
            found += below
            queue += below
        return found

    def _die_with_parent(self) -> Callable[[], object] | None:
        """Return a function for the child that lets the kernel end it with the agent; None where that is not needed or
        possible.

        In a pod the kernel ends every process with PID 1. Elsewhere a killed agent must not leave ranks behind.
        """
        prctl, agent = self._prctl, os.getpid()
        if prctl is None:
            return None

        def die_with_parent() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != agent:  # it was killed before, and no signal comes any more
                os._exit(1)

        return die_with_parent


def make_undumpable() -> None:
    """Keep what runs as the same user out of this process: no /proc/<pid>/mem or environ, no ptrace, no core file. A
    program that is executed from here is an ordinary one again, so ranks can be debugged."""
    prctl = _load_prctl()
    if prctl is not None:
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _load_prctl() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not Linux
        return None
    function.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    return function


def _kill_process(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _read_stat(pid: int) -> tuple[str, str, int] | None:
    """Return (command name, state, parent) from /proc; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may itself hold parentheses
    fields = rest.split()
    return name, fields[0], int(fields[1])


def _is_in_our_container(pid: int) -> bool:
    """Tell by its cgroups; true where that cannot be known."""
    ours, theirs = _read_cgroups("self"), _read_cgroups(str(pid))
    return all(
        name not in ours or path == ours[name] or (path.startswith(f"{ours[name].rstrip('/')}/") and "/.." not in path)
        for name, path in theirs.items()
    )


def _read_cgroups(pid: str) -> dict[str, str]:
    """Return the path in each hierarchy; nothing of a process that has ended."""
    stat = _read_stat(int(pid)) if pid.isdecimal() else None
    if stat is not None and stat[1] in ("Z", "X"):  # it has left its cgroup already
        return {}
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return {}
    return {name: path for _, name, path in (line.split(":", 2) for line in lines)}


def _read_parents() -> dict[int, int]:
    parents = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - pathlib would stat each of them
        if entry.isdecimal():
            stat = _read_stat(int(entry))
            if stat is not None:
                parents[int(entry)] = stat[2]
    return parents


def _list_children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid, parent in _read_parents().items():
        children.setdefault(parent, []).append(pid)
    return children


def _list_signal_targets(pids: Iterable[int], signum: int) -> list[int]:
    main = set(pids)  # started here, or by a shell: what the command is about
    found, queue = [], list(main)
    children: dict[int, list[int]] | None = None
    while queue:
        current = queue.pop()
        stat = _read_stat(current)
        if stat is None:
            continue
        masks, bit = _signal_masks(current), 1 << (signum - 1)
        if current in main or not masks.get("SigIgn", 0) & bit:  # else a helper that would only be waited for
            found.append(current)
        expected = not masks or any(mask & bit for mask in masks.values())
        shell = stat[0] in _SHELLS or _program_name(current) in _SHELLS
        if shell or not expected:
            children = _list_children() if children is None else children
            below = children.get(current, [])
            queue += below
            main.update(below if shell else ())
    return found


def _signal_masks(pid: int) -> dict[str, int]:
    """Return the signals that a process blocks, ignores and has handlers for: it does not simply die of them.

    Empty where nobody knows: the process has ended, or the kernel does not tell, as that of gVisor.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
        fields = dict(line.decode("latin-1").split(":", 1) for line in lines if line.startswith(b"Sig"))
        return {name: int(fields[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt")}
    except (OSError, ValueError, KeyError):
        return {}


def _program_name(pid: int) -> str:
    """Return the name of the file that runs: that of the shell where the command name is a script's (`#!/bin/sh`)."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # it has ended, or may not be looked at
        return ""


def _describe_process(pid: int) -> str:
    stat = _read_stat(pid)
    return f"{pid} (gone)" if stat is None else f"{pid} ({stat[0]}, state {stat[1]})"
