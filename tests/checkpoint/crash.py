"""Processes of a save that die or freeze at a chosen call of the file system, and a record of all such calls."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.retention.retention import prune_store
from everstep.checkpoint.store.files import Files
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint import leftovers
from tests.checkpoint.builders import Training
from tests.checkpoint.forked import forkserver

# Every method of the seam changes the file system, or makes a change durable.
CALLS = [name for name in vars(Files) if not name.startswith("_")]

Watcher = Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]


class Watched(Files):
    """Files of which every call goes through `watcher(name, arguments, call)`."""

    def __init__(self, watcher: Watcher) -> None:
        for name in CALLS:
            setattr(self, name, self._through(watcher, name, getattr(self, name)))

    @staticmethod
    def _through(watcher: Watcher, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: watcher(name, arguments, lambda: real(*arguments))


@dataclass(frozen=True)
class Point:
    """Before or after the `number`-th call (from 0) of a process."""

    number: int
    after: bool

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} call {self.number}"


def points(count: int) -> list[Point]:
    """All points of a process that makes `count` calls."""
    return [Point(number, after) for number in range(count) for after in (False, True)]


def node_task(store: PosixStore, training: Training, key: Key, node: int) -> None:
    """Save as the process of one node does; that of node 0 commits too."""
    training.write(store, key, node)
    if node == 0:
        training.commit(store, key)


def prune_task(store: PosixStore, training: Training, key: Key, node: int) -> None:
    """Retention after the commit of `key`, in the process of node 0."""
    prune_store(store, {key}, keep_last=1)


Task = Callable[[PosixStore, Training, Key, int], None]


def count_calls(folder: Path, task: Task, training: Training, key: Key, node: int) -> list[str]:
    """The names of the calls that an undisturbed process of its own makes."""
    reader, writer = forkserver().Pipe(duplex=False)
    process = forkserver().Process(target=_counted, args=(writer, folder, task, training, key, node))
    process.start()
    names: list[str] = reader.recv()
    process.join(30)
    assert process.exitcode == 0
    return names


def start(folder: Path, task: Task, training: Training, key: Key, node: int, point: Point, number: int) -> BaseProcess:
    """A process that sends itself the signal `number` at `point`."""
    process = forkserver().Process(target=_disturbed, args=(folder, task, training, key, node, point, number))
    process.start()
    return process


def killed(folder: Path, task: Task, training: Training, key: Key, node: int, point: Point) -> None:
    """Runs a process until it kills itself at `point`."""
    process = start(folder, task, training, key, node, point, signal.SIGKILL)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL, f"{point}: {process.exitcode}"


def frozen(folder: Path, task: Task, training: Training, key: Key, node: int, point: Point) -> BaseProcess:
    """A process that has stopped itself at `point`."""
    process = start(folder, task, training, key, node, point, signal.SIGSTOP)
    assert process.pid is not None
    deadline = time.monotonic() + 30
    while state_of(process.pid) != "T":
        assert time.monotonic() < deadline, f"{point}: not stopped but {state_of(process.pid)}"
        assert process.is_alive(), f"{point}: {process.exitcode}"
        time.sleep(0.001)
    return process


@contextmanager
def in_memory(otherwise: Path) -> Iterator[Path]:
    """A folder in memory where there is some: what a kill leaves does not depend on the disk, fsync's price does."""
    place = os.environ.get(leftovers.MEMORY)
    if place is None:
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)


def everything(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def state_of(pid: int) -> str:
    """A letter, as in /proc: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _counted(answer: Any, folder: Path, task: Task, training: Training, key: Key, node: int) -> None:
    names: list[str] = []

    def watch(name: str, _arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        names.append(name)
        return call()

    task(PosixStore(folder, files=Watched(watch)), training, key, node)
    answer.send(names)


def _disturbed(folder: Path, task: Task, training: Training, key: Key, node: int, point: Point, number: int) -> None:
    count = 0

    def watch(_name: str, _arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal count
        here = count == point.number
        count += 1
        if here and not point.after:
            os.kill(os.getpid(), number)
        try:
            return call()
        finally:
            if here and point.after:
                os.kill(os.getpid(), number)

    task(PosixStore(folder, files=Watched(watch)), training, key, node)


def main() -> None:
    """`python -m tests.checkpoint.crash FOLDER STEP NODE ROWS`: one node's part of a save, for a tracer to watch."""
    folder, step, node, rows = sys.argv[1:]
    from tests.checkpoint.builders import key

    node_task(PosixStore(folder), Training(rows=int(rows)), key(int(step)), int(node))


if __name__ == "__main__":
    main()
