"""Connect a rank to its node's writer: JSON lines over a Unix socket that only our user may open.

A rank's line with an `id` gets one answer with the same `id`: `{"id": 1, "ok": …}` or `{"id": 1, "error": …}`. Lines
without an `id` are reports of the writer (events.py) and come at any time. The socket lies in a directory of mode 0700,
has mode 0600, and both ends look at the other's user.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Attempt
from everstep.checkpoint.slots import slot_files
from everstep.checkpoint.slots.own_files import LOG as LOG
from everstep.checkpoint.slots.own_files import SOCKET as SOCKET
from everstep.checkpoint.writer.detached_process import DetachedProcess
from everstep.checkpoint.writer.rank_environment import find_environment, list_places, list_variables

PROTOCOL = 5
MAX_LINE = 1 << 20
START_TIMEOUT = 30.0
ANSWER_TIMEOUT = 60.0
TAKEOVER_TIMEOUT = 10.0  # seconds that processes of an earlier attempt may take to die
SUM_TIMEOUT = 60.0  # seconds that a restore waits for what a writer sums; memory is read at some GB each second
_ASK_TIMEOUT = 5.0
_OTHERS_PATIENCE = 3.0  # seconds that other ranks than local rank 0 wait for its writer before they start one
_NAMESPACE = Path("/proc/self/ns/pid")
_MAX_KILLED = 3  # writers that are started anew since a signal ended them at once
_PACKAGE_ROOT = str(Path(__file__).absolute().parents[3])  # where this everstep lies, so that no other one is taken
# What the rank could import, the writer can too, however it came into the rank's path; but after all that Python has
# itself, since a module of the script's folder may have the name of one of those. Signals that the rank has blocked, as
# who waits for them in a thread does, would be blocked in its child: a writer hears SIGTERM.
_WRITER_CODE = """
import signal
import sys
signal.pthread_sigmask(signal.SIG_SETMASK, ())
root, places = sys.argv[1], sys.argv[5:]
sys.argv[1:] = sys.argv[2:5]
sys.path.insert(0, root)
import everstep
sys.path.remove(root)
sys.path += [place for place in [root, *places] if place not in sys.path]
from everstep.checkpoint.writer.writer import main
main()
"""


class WriterLost(CheckpointError):
    """The node's writer does not answer; what it had not stored yet may still be in the slots."""


@dataclass(frozen=True)
class WriterConfig:
    """The facts of a run that its writers need; every rank of a node gives the same. Times are in seconds."""

    url: str
    options: Mapping[str, Any]
    attempt: str
    node: int
    nodes: int
    world: int
    ranks: tuple[int, ...]  # of this node, in the order of local ranks
    slots: int = 2
    keep_last: int = 3
    keep_every: int | None = None
    keep_best: int | None = None
    best_metric: str = "loss"
    best_mode: Literal["min", "max"] = "min"
    commit_timeout: float = 1800.0
    stall_after: float = 60.0
    fence: str | None = None
    secret: str = field(default="", repr=False)  # of the run; without one the writer listens to no other node
    keeper: tuple[str, int] | None = None  # host and port of the writer that keeps copies of our slots
    run: str = ""  # what the store is called (publish/attempts.py); empty when it could not be asked
    insist: bool = False  # the run does not begin without room for the copies of another node
    first_host: str = ""  # the machine of node 0, for messages

    def __post_init__(self) -> None:
        Attempt.parse(self.attempt)
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if self.keeper is not None:
            object.__setattr__(self, "keeper", (str(self.keeper[0]), int(self.keeper[1])))


def peer_of(peer: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end of a Unix socket."""
    pid, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid), int(user)


def describe_process() -> str:
    """Return what tells this process from those of other pid namespaces, all of which a writer sees as process 0."""
    with contextlib.suppress(OSError):
        return f"{_NAMESPACE.readlink()} {os.getpid()}"
    return str(os.getpid())


@contextlib.contextmanager
def shorten_socket_path(path: Path) -> Any:
    """A name of `path` that fits a socket's address (108 bytes), however deep its directory is."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


class WriterLink:
    """A rank's end. Not thread-safe."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer, self._process = peer, os.getpid()
        self._rest = b""
        self._calls = 0
        self._reports: deque[dict[str, Any]] = deque()
        self._has_ended = False  # nothing comes any more; reports may still be here
        self.port: int | None = None  # of the writer, for other nodes

    @classmethod
    def connect(cls, directory: Path) -> WriterLink:
        """Connect to the writer of a directory.

        Raises OSError when no writer listens there, CheckpointError when it is not ours.
        """
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            with shorten_socket_path(directory / SOCKET) as name:
                peer.connect(name)
            pid, user = peer_of(peer)
            if user != os.geteuid():
                raise CheckpointError(f"the writer of {directory}, process {pid}, belongs to user {user}")
        except BaseException:
            peer.close()
            raise
        peer.setblocking(False)
        return cls(peer)

    def hello(self, config: WriterConfig, local: int, timeout: float = ANSWER_TIMEOUT) -> None:
        """Say who we are and what the run is like; again when that has changed, on all ranks of the node."""
        said = self.call(
            "hello",
            timeout,
            protocol=PROTOCOL,
            process=describe_process(),
            local=local,
            config=vars(config),
            environment=list_variables(MAX_LINE // 8),
        )
        self.port = said["port"]

    @property
    def pid(self) -> int:
        """Return the writer's process."""
        return peer_of(self._peer)[0]

    def call(self, verb: str, timeout: float = ANSWER_TIMEOUT, **fields: Any) -> Any:
        """Return the writer's answer.

        CheckpointError: it refused and says why. WriterLost: it is gone or says nothing.
        """
        return self.answer(self.tell(verb, **fields), timeout)

    def tell(self, verb: str, **fields: Any) -> int:
        """Like call(), but does not wait: the number is for answer(). Without it, what goes wrong is a report."""
        self._calls += 1
        line = json.dumps({"id": self._calls, "verb": verb, **fields}).encode() + b"\n"
        self._send(line, time.monotonic() + ANSWER_TIMEOUT)
        return self._calls

    def answer(self, number: int, timeout: float = ANSWER_TIMEOUT) -> Any:
        """Return the writer's answer to tell(), and drop answers to earlier ones. See call().

        Args:
            number: The number that tell() returned.
            timeout: In seconds.
        """
        until = time.monotonic() + timeout
        while True:
            for line in self._receive(until):
                if line.get("id") == number:
                    if "error" in line:
                        raise CheckpointError(str(line["error"]))
                    return line["ok"]
            if self._has_ended:
                raise WriterLost("the writer is gone")
            if time.monotonic() >= until:
                raise WriterLost(f"the writer did not answer in {timeout:g} s")

    def reports(self, timeout: float = 0.0) -> list[dict[str, Any]]:
        """Return the writer's reports that have come by now, after waiting at most `timeout` seconds for the first one.

        Raises:
            WriterLost: The writer is gone.
        """
        if not self._reports:
            self._receive(time.monotonic() + timeout)
        found = list(self._reports)
        self._reports.clear()
        return found

    def close(self) -> None:
        """Hang up, also where children that were forked meanwhile hold the socket: workers of a loader may live on."""
        with contextlib.suppress(OSError):
            if os.getpid() == self._process:  # else it is our parent's
                self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()

    def _wait(self, event: int, until: float) -> bool:
        """Wait for an event of the socket; False when there was none.

        Not by select(), which knows no descriptor above 1,023: a training with a few loaders has more of them.
        """
        poll = select.poll()
        poll.register(self._peer, event)
        return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))

    def _send(self, data: bytes, until: float) -> None:
        while data:
            try:
                data = data[self._peer.send(data, socket.MSG_NOSIGNAL) :]  # whatever a script does about SIGPIPE
            except BlockingIOError:
                if not self._wait(select.POLLOUT, until):
                    raise WriterLost("the writer does not read what it is told") from None
            except OSError as error:
                raise WriterLost(f"the writer is gone: {error}") from error

    def _receive(self, until: float) -> list[dict[str, Any]]:
        """Answers among what has come, after waiting for something; reports are put aside."""
        self._wait(select.POLLIN, until)
        answers: list[dict[str, Any]] = []
        while True:
            try:
                data = self._peer.recv(1 << 16)
            except BlockingIOError:
                return answers
            except OSError as error:
                raise WriterLost(f"the writer is gone: {error}") from error
            if not data:
                self._has_ended = True
                if self._reports or answers:  # its last words first
                    return answers
                raise WriterLost("the writer is gone")
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                (answers if "id" in said else self._reports).append(said)


def start_writer(directory: Path, linger: float, patience: float = START_TIMEOUT) -> DetachedProcess:
    """Start a writer in a session of its own, without torch, CUDA or any open file of ours.

    It ends when another writer keeps the directory for `patience` seconds.

    Raises:
        CheckpointError: The directory is not ours alone.
        WriterLost: It cannot be started.
    """
    slot_files.secure_directory(directory)
    arguments = [str(directory), f"--linger={linger:g}", f"--patience={patience:g}"]
    try:
        with (directory / LOG).open("ab") as log:
            return DetachedProcess(
                [sys.executable, "-P", "-c", _WRITER_CODE, _PACKAGE_ROOT, *arguments, *list_places()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=find_environment(),
                start_new_session=True,
            )
    except OSError as error:
        raise WriterLost(f"no writer can be started in {directory}: {error}") from error


def ensure_writer(directory: Path, linger: float, timeout: float = START_TIMEOUT) -> None:
    """See that a writer listens in a directory, and start one where none does. For one process of a node.

    Whatever keeps a writer from starting is known here: a rank that only connects would wait for it until its timeout.

    Raises:
        CheckpointError: The directory or the writer in it is not ours.
        WriterLost: None can be started.
    """
    _Starter(directory, linger, timeout).connect().close()


def join_writer(
    directory: Path, config: WriterConfig, local: int, linger: float, timeout: float = START_TIMEOUT
) -> WriterLink:
    """Connect this rank to its node's writer.

    Local rank 0 starts one where none runs, and the others do where it has not, since it may wait for them by then; one
    that outlived an earlier attempt goes on, so that what it still stores is not disturbed.
    """
    starter = _Starter(directory, linger, timeout)
    while True:
        link = starter.connect(starts_after=local and _OTHERS_PATIENCE + local)
        try:
            link.hello(config, local, max(1.0, starter.seconds_left))
        except WriterLost as error:  # it was just about to end
            link.close()
            starter.wait_or_raise(error)
        except BaseException:
            link.close()
            raise
        else:
            return link


class _Starter:
    """Tries to connect to the writer of a directory for so many seconds, and starts one in between."""

    def __init__(self, directory: Path, linger: float, timeout: float) -> None:
        self._directory = directory
        self._linger = linger
        self._timeout = timeout
        self._until = time.monotonic() + timeout
        self._child: DetachedProcess | None = None
        self._killed = 0  # writers that a signal ended before they listened

    @property
    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    def connect(self, *, starts_after: float = 0.0) -> WriterLink:
        began = time.monotonic()
        while True:
            try:
                return WriterLink.connect(self._directory)
            except OSError as error:  # none yet
                if time.monotonic() - began >= starts_after:
                    self._ensure_child(error)
                self.wait_or_raise(error)

    def _ensure_child(self, error: Exception) -> None:
        if self._child is not None:
            if (status := self._child.poll()) is None:
                return
            self._killed += status < 0
            if status > 0 or self._killed > _MAX_KILLED:
                how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
                raise WriterLost(f"the writer {how}: {_read_log_tail(self._directory)}") from error
        self._child = start_writer(self._directory, self._linger)

    def wait_or_raise(self, error: Exception) -> None:
        """Give the writer a moment; WriterLost when the time is over."""
        if self.seconds_left <= 0:
            why = f"no writer answers in {self._directory} after {self._timeout:g} s: {_read_log_tail(self._directory)}"
            raise WriterLost(why) from error
        time.sleep(0.01)


def is_occupied(
    directory: Path,
    *,
    given: Attempt | None = None,
    claimed: Attempt | None = None,
    while_waiting: Callable[[], None] = lambda: None,
) -> bool:
    """Say whether a live run has the slots in this directory, so that a process that only reads leaves them alone.

    Asking claims nothing and changes nothing for the run. What the ranks of a run that is over had filled is waited for
    until its writer has made it whole, for SUM_TIMEOUT seconds at most: a restore right after a kill finds it.

    Args:
        directory: The slots' directory.
        given: The attempt that this process was given, if any. What is left of an earlier one gets TAKEOVER_TIMEOUT
            seconds to die: a run that was started again finds in the slots what that one saved last.
        claimed: The attempt that this process takes part in, if any: its own slots are not occupied.
        while_waiting: Called now and then.

    Returns:
        True when processes of a run are connected to the writer and alive, or when it does not say in time or may not
        be asked.
    """
    began = time.monotonic()
    while True:
        try:
            with contextlib.closing(WriterLink.connect(directory)) as link:
                said = link.call("occupants", _ASK_TIMEOUT, process=describe_process())
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return False  # nobody listens
        except PermissionError:
            return True  # somebody whom we may not ask
        except (OSError, WriterLost):  # one that is just about to end, or hangs
            if time.monotonic() - began > _ASK_TIMEOUT:
                return True
        except CheckpointError:
            return True  # somebody else's, or another version
        else:
            theirs = Attempt.parse(said["attempt"]) if said["pids"] else None
            if theirs is None and said.get("is_summing") and time.monotonic() - began < SUM_TIMEOUT:
                while_waiting()
                time.sleep(0.02)
                continue
            if theirs is None or theirs == claimed:
                return False
            if given is None or given <= theirs or time.monotonic() - began > TAKEOVER_TIMEOUT:
                return True
        time.sleep(0.05)


def _read_log_tail(directory: Path) -> str:
    with contextlib.suppress(OSError):
        lines = (directory / LOG).read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:]) or "it said nothing"
    return "it left no log"
