"""Starts, reaps and ends processes: all of them, also those that nobody here started."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Callable

from .process_table import describe_process, is_in_our_container, list_children, read_parents, read_stat
from .signal_targets import SignalTargets, list_signal_targets
from .threads import in_thread_if_possible
from .trap_relay import TrapRelay

_MAX_SEEN = 4096  # PIDs that are remembered; a node hardly runs more processes at a time
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
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

    async def forward(self, processes: Iterable[ChildProcess], signum: int) -> SignalTargets:
        """Send a signal to processes and, where one passes it on to nobody, to what it runs; see `signal_targets`.

        Args:
            processes: Some that were started here.
            signum: The signal.

        Returns:
            Who heard it, and who ends with those.
        """
        first = {process.pid: process for process in processes if process.status is None}
        targets = await in_thread_if_possible(lambda: list_signal_targets(first, signum), "look-at-processes")

        def send(pid: int, number: int) -> None:
            if pid not in first or first[pid].status is None:
                _kill_process(pid, number)

        # All in one go: nobody who cancels this may send it to some of them again.
        for pid in targets.heard.difference(targets.trapped, targets.trapped.values()):
            send(pid, signum)
        if targets.trapped:
            TrapRelay(targets.trapped, signum, send)
        return targets

    def living(self, pids: Iterable[int]) -> set[int]:
        """Return those of `pids` that have not ended. Orphans are ours to reap, so what is left as a zombie is not
        ours."""
        return {pid for pid in pids if (read_stat(pid) or ("", "Z", 0))[1] not in ("Z", "X")}

    async def wait_until_ended(self, pids: Collection[int], deadline: float) -> None:
        """Wait until none of these processes is left, or `deadline` (monotonic)."""
        pause = 0.005
        left = self.living(pids)
        while left and time.monotonic() < deadline:
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, 0.1)
            left = self.living(left)

    async def end_named(self, name: str, deadline: float) -> set[int]:
        """Send TERM to the processes of this name, and wait for their end until `deadline` (monotonic). Return those
        that are left."""
        others = await in_thread_if_possible(self._others, "look-at-processes")
        found = [pid for pid in others if (read_stat(pid) or ("",))[0] == name]
        for pid in found:
            _kill_process(pid, signal.SIGTERM)
        await self.wait_until_ended(found, deadline)
        return self.living(found)

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
                return "still alive after SIGKILL: " + ", ".join(describe_process(pid) for pid in left[:8])
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
            parents = read_parents()
            ours = [pid for pid in parents if pid != me and is_in_our_container(pid)]
            self._has_guests = len(ours) < len(parents) - (me in parents)
            return ours
        children = list_children()
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


def name_process(name: str) -> None:
    """Give this process a name of at most 15 bytes in `ps` and `top`, so that whoever ends what else runs by its name
    (`pkill python` at the start of a script) does not end this one."""
    prctl = _load_prctl()
    if prctl is not None:
        text = ctypes.create_string_buffer(name.encode())
        prctl(_PR_SET_NAME, ctypes.addressof(text), 0, 0, 0)


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
