"""A job as processes of this machine: an agent for each node, on the loopback, with job.json as on a cluster."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from everstep.cli.errors import CliError
from everstep.cli.lines import LogLine, parse_line

LOOPBACK_ADDRESS = "127.0.0.1"
EPOCH = 1
TOKEN_BYTES = 32
KILL_SECONDS = 5.0
ENDING_SECONDS = (
    150.0  # seconds in which the agents of a command that was killed have ended: their grace, and some more
)
PARENT_DEATH_SIGNAL = signal.SIGUSR2  # agents take it for a stop, and do not count it: it may come several times
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class LocalJob:
    """A job for this machine. `config` is job.json, `environment` what the ranks get besides this process's own."""

    config: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def num_nodes(self) -> int:
        """Return the number of agents."""
        return int(self.config["numNodes"])

    def with_variables(self, variables: Mapping[str, str]) -> LocalJob:
        """Return the job with more variables for the library in its ranks."""
        config = {**self.config, "variables": {**self.config["variables"], **variables}}
        return LocalJob(config, self.environment)


class LocalAgents:
    """A set of agents of one run. `write` is called with each line of output, from a thread of its own for each
    stream."""

    def __init__(
        self, job: LocalJob, base: Path, agent: Path, write: Callable[[LogLine], None], lock: int | None = None
    ) -> None:
        """Start the agents.

        Args:
            job: The job.
            base: The folder of its files; see `lock_base_folder`.
            agent: The agent's zipapp.
            write: Takes the lines of output.
            lock: A descriptor that the agents keep open, until the last of them has ended.
        """
        self.base = base
        self._lock = () if lock is None else (lock,)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        ports = find_free_ports(job.num_nodes)
        self.addresses = {index: f"{LOOPBACK_ADDRESS}:{port}" for index, port in enumerate(ports)}
        self._write = write
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        base.mkdir(parents=True, exist_ok=True)
        _write_private_file(base / "token", self.token)
        (base / "job.json").write_text(json.dumps({**job.config, "job": _add_job_uid(job.config["job"])}))
        for word in base.glob("node-*/termination-log"):
            word.unlink()  # of an earlier run, which would be taken for this one's
        try:
            for index, port in enumerate(ports):
                self._processes.append(self._start(index, port, agent, job.environment))
        except BaseException:
            self.kill()
            raise

    @property
    def exit_codes(self) -> list[int | None]:
        """Return the agents' exit codes by node; None while one runs."""
        return [process.poll() for process in self._processes]

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether all agents ended in this many seconds and all their output was written."""
        try:
            for process in self._processes:
                process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        for thread in self._threads:
            # A process that outlived its agent may keep the pipe open.
            thread.join(2)
        return True

    def read_termination_message(self, index: int = 0) -> dict[str, Any]:
        """Return the termination message of an agent, by default the leader's; empty if it did not come to that."""
        try:
            word: dict[str, Any] = json.loads((self.base / f"node-{index}" / "termination-log").read_bytes())
        except (OSError, ValueError):
            return {}
        return word

    def kill(self) -> None:
        """End the agents with all that their ranks left behind: only they know every descendant, so they are asked
        (the third signal leaves no grace) before they are killed themselves."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(number)
            time.sleep(0.05)  # signals that are pending together are one
        deadline = time.monotonic() + KILL_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, index: int, port: int, agent: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command: Sequence[str] = (
            *(sys.executable, "-I", "-S", "-B", str(agent), "run", "--local", str(self.base)),
            *("--index", str(index), "--port", str(port), "--address", LOOPBACK_ADDRESS),
        )
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The terminal's Ctrl-C is for us: the job is stopped through its leader, with grace.
            start_new_session=True,
            pass_fds=self._lock,
            preexec_fn=_make_parent_death_hook(),
        )
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            thread = threading.Thread(target=self._forward_output, args=(f"node {index}", stream), daemon=True)
            thread.start()
            self._threads.append(thread)
        return process

    def _forward_output(self, node: str, stream: IO[bytes]) -> None:
        """Give each line of a stream to `write`, until the stream ends."""
        for raw in stream:
            self._write(parse_line(raw.decode(errors="replace"), node, stamped=False))


@contextlib.contextmanager
def lock_base_folder(base: Path) -> Iterator[int]:
    """Make the folder of a run, and hold it for this run alone: two would write each other's token, configuration and
    fencing token.

    The agents of a command that was killed hold it until they have ended, since their ranks save first. They are waited
    for: whoever kills a command is likely to start it again at once.

    Args:
        base: The folder.

    Yields:
        The descriptor of its lock. Whoever inherits it holds the folder as well.

    Raises:
        CliError: It cannot be made or written, or another run uses it.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        lock = os.open(base / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}: give another folder with --base") from error
    try:
        deadline = time.monotonic() + ENDING_SECONDS
        while not _try_to_lock(lock):
            if time.monotonic() > deadline or _is_owner_alive(base / "lock"):
                raise CliError(
                    f"{base} is in use by another run: wait until it ends, or give another folder with --base"
                )
            time.sleep(0.05)
        os.ftruncate(lock, 0)
        os.pwrite(lock, _describe_process(os.getpid()).encode(), 0)
        yield lock
    finally:
        os.close(lock)


def _try_to_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _is_owner_alive(file: Path) -> bool:
    """Tell whether the command that has locked a folder lives, as far as its file says: else only its agents do."""
    try:
        said = file.read_text()
        return not said or _describe_process(int(said.split()[0])) == said
    except (OSError, ValueError):
        return True


def _describe_process(pid: int) -> str:
    """Return the number of a process and when it began, which no later one has in common; 0 where it does not live."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"{pid} 0"
    return f"{pid} {'0' if state in 'ZX' else fields[18]}"


def _make_parent_death_hook() -> Callable[[], object] | None:
    """Return a hook that ends an agent with this process, or None: whoever kills `everstep run` does not mean to train
    on unseen. Linux only."""
    import ctypes

    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError):
        return None
    return lambda: prctl(_PR_SET_PDEATHSIG, PARENT_DEATH_SIGNAL, 0, 0, 0)


def find_free_ports(count: int) -> list[int]:
    """Return ports nobody listens on; all are held until all are found, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK_ADDRESS, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _add_job_uid(job: Mapping[str, Any]) -> dict[str, Any]:
    return {**job, "uid": job.get("uid") or str(uuid.uuid4())}


def _write_private_file(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
