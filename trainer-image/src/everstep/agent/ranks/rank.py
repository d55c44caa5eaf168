"""One rank: its process, output, progress, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from everstep.agent.system import faults, oom
from everstep.agent.system.processes import ChildProcess, ChildProcesses

from . import environment, failure_causes, logs, tracebacks
from .events import Event, RankExited, RankProgressed, RankStarted
from .failure_file import FailureFile
from .progress import ProgressReader, ProgressUpdate
from .stack_dumps import StackDump

_KILL = 9


class RankContext(NamedTuple):
    """A node's part of one generation that all its ranks share."""

    generation: int
    processes: ChildProcesses
    stdout: logs.LogSink
    stderr: logs.LogSink
    emit: Callable[[Event], None]
    memory_counter: Path | None
    kills_before: int | None  # OOM kills when the generation began
    failure_file: FailureFile  # where a program may say why it failed; absent when the generation began
    start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class RankCommand(NamedTuple):
    """The command of a rank, and the process in which it runs.

    Attributes:
        argv: The program and its arguments.
        env: All its variables.
        cwd: Its folder; the agent's if None.
        pass_fds: File descriptors that stay open in it.
        affinity: The CPUs that it may use; all if None.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str | None = None
    pass_fds: Sequence[int] = ()
    affinity: set[int] | None = None


class Rank:
    """Starts at once. Its exit is reported by one RankExited, also when the command cannot be executed.

    Raises OSError where the pod lacks what any command needs: room for a FIFO, processes, descriptors.
    """

    def __init__(
        self,
        context: RankContext,
        command: RankCommand,
        *,
        rank: int,
        local_rank: int,
        tag: str,
        fifo: Path,
        on_exit: Callable[[int], None] | None = None,
    ) -> None:
        self.rank, self.local_rank = rank, local_rank
        self.process: ChildProcess | None = None
        self.stack_dump: StackDump = None
        self._context = context
        self._on_exit = on_exit
        self._tag = tag
        self._ending: asyncio.Task[None] | None = None
        self._output = logs.ProcessOutput(context.stdout, context.stderr, tag)
        self._progress_reader = ProgressReader(fifo, self._report_progress, self._write_log_line)
        try:
            self.process = context.processes.start(
                command.argv,
                command.env,
                stdout=self._output.stdout.inner,
                stderr=self._output.stderr.inner,
                cwd=command.cwd,
                pass_fds=command.pass_fds,
                affinity=command.affinity,
                on_exit=self._handle_exit,
            )
        except (OSError, ValueError) as error:
            if faults.is_pod_fault(error):
                raise
            code, message = _explain_start_failure(command, error)
            self._write_log_line(message)
            self._report_exit(code, None, message, ())
        else:
            context.emit(RankStarted(context.generation, rank, local_rank))
        finally:
            self._output.opened()

    def kill(self) -> None:
        if self.process is not None:
            self._context.processes.kill_group(self.process)

    async def wait_until_reported(self) -> None:
        """Wait until the end of a process that has ended is reported."""
        if self._ending is not None:
            await asyncio.wait([self._ending])

    def close(self) -> None:
        self._progress_reader.close()
        self._output.close()

    def _handle_exit(self, process: ChildProcess) -> None:
        self._progress_reader.drain()
        tail = self._output.tail()
        signum, code = process.signal, process.exit_code
        message = ending = _describe_ending(code, signum)
        killed = self._ran_out_of_memory(code, signum, tail)
        if killed:
            message = f"{message} (out of memory)"
        if code != 0 and not (killed and signum == _KILL):
            message = tracebacks.explain_exit(tail, message, code, signum, self._output.pause)
            if killed and "out of memory" not in message:
                message = f"{message} (out of memory)"
        if code == 0:
            self._report_exit(code, signum, message, tail, killed)
        else:
            report = self._report_exit_with_own_words(code, signum, message, ending, tail, killed)
            self._ending = self._context.start_task(report)

    async def _report_exit_with_own_words(
        self, code: int, signum: int | None, message: str, ending: str, tail: tuple[str, ...], killed: bool
    ) -> None:
        said = await self._context.failure_file.read()
        # The node's ranks share the file: who lost a peer may write before the peer's own end is seen.
        if message == ending or failure_causes.names_lost_peer(message) or not failure_causes.names_lost_peer(said):
            message = said or message
        self._report_exit(code, signum, message, tail, killed)

    def _report_exit(
        self, code: int, signum: int | None, message: str, tail: tuple[str, ...], killed: bool = False
    ) -> None:
        context = self._context
        context.emit(RankExited(context.generation, self.rank, self.local_rank, code, signum, killed, message, tail))
        if self._on_exit is not None:
            self._on_exit(code)

    def _ran_out_of_memory(self, code: int, signum: int | None, tail: tuple[str, ...]) -> bool:
        """Return whether the kernel killed the rank for want of memory.

        The counter is the container's: a kill counts for a rank that died of KILL, or (a shell's 137, a data loader's
        words) says that a process of its own did.
        """
        now = oom.count_oom_kills(self._context.memory_counter)
        if now is None or self._context.kills_before is None or now <= self._context.kills_before:
            return False
        return signum == _KILL or code == 128 + _KILL or any("killed by signal: Killed" in line for line in tail)

    def _report_progress(self, update: ProgressUpdate) -> None:
        context = self._context
        self.stack_dump = update.stack_dump
        metrics = dict(update.metrics)
        context.emit(
            RankProgressed(
                context.generation, self.rank, update.step, update.total, update.phase, metrics, update.checkpoint
            )
        )

    def _write_log_line(self, text: str) -> None:
        self._context.stderr.write(f"{self._tag}everstep: {text}\n".encode(errors="replace"))


def _describe_ending(code: int, signum: int | None) -> str:
    if signum is None:
        return f"exited with code {code}"
    return f"killed by {get_signal_name(signum)}"


def get_signal_name(signum: int) -> str:
    import signal

    with contextlib.suppress(ValueError):
        return signal.Signals(signum).name
    return f"signal {signum}"


def _explain_start_failure(command: RankCommand, error: Exception) -> tuple[int, str]:
    """Return the code and message of a shell: 127 not found, 126 found but not executable."""
    program = command.argv[0] if command.argv else ""
    if isinstance(error, FileNotFoundError):
        return 127, f"{program}: {_explain_missing(program, command)}"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return 126, f"{program}: cannot be executed: {reason}"


def _explain_missing(program: str, command: RankCommand) -> str:
    """Return what the kernel does not find: the program, its interpreter, or the folder in which it is to run."""
    path = command.env.get("PATH")
    if command.cwd is not None and not Path(command.cwd).is_dir():
        return f"its working folder {command.cwd} is not there"
    found = shutil.which(program, path=os.defpath if path is None else path)
    if found is None:
        hint = "; a command is a list with an item for each word, or [sh, -c, the whole line]" if " " in program else ""
        return f"not found in the image (PATH={path or ''}){hint}"
    try:
        interpreter = environment.read_interpreter(Path(found))
    except OSError as error:
        return f"it cannot be read, nor be executed: {error.strerror}"
    if interpreter is None:
        return "the loader that it needs is not in the image: it was built for another system (glibc, musl)"
    return f"its interpreter {interpreter!r} is not in the image: look at its first line, and at how that line ends"
