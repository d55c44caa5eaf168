"""All processes of a save as real ones, without torch: ranks that fill slots, the writers of their nodes.

A writer here is the writer itself, started from a process that has imported it already.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.slots.directory_lock import lock_directory
from everstep.checkpoint.slots.slots import Slots
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.writer import control, writer
from everstep.checkpoint.writer.control import WriterConfig, WriterLink, WriterLost
from tests.checkpoint.crash import Point, state_of
from tests.checkpoint.forked import forkserver
from tests.checkpoint.slot_builders import content, fill
from tests.checkpoint.system_calls import Calls

SIZES = [300_000, 9_000]  # bytes of the part of each rank
PATIENCE = 60.0


def until(true: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := true()):
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what}"
        time.sleep(0.002)
    return found


def good(store: Store, key: Key) -> bool:
    """Bit for bit what its ranks have filled."""
    manifest = verify_checkpoint(store, key)
    parts = {part.name: store.read(part.name) for part in manifest.parts}
    return parts == {key.part_name(rank): content(key, rank, SIZES[rank]) for rank in range(len(SIZES))}


def newest(store: Store) -> Key | None:
    """The greatest checkpoint that verifies, after it was seen that it is bit for bit what was saved."""
    for key in list_candidates(store):
        assert good(store, key)  # a damaged one would be passed over: here none is expected
        return key
    return None


class Process:
    """`work(answer, *args)` elsewhere; `answer` is called once, at its end."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self._answer, theirs = forkserver().Pipe(duplex=False)
        self._process = forkserver().Process(target=_run, args=(theirs, work, args))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.is_alive()

    @property
    def ended_with(self) -> int | None:
        """The exit code, once it has ended."""
        self._process.join(PATIENCE)
        return self._process.exitcode

    def stops(self) -> bool:
        """Waits until it has stopped itself; False when it has ended instead."""
        until(lambda: not self.runs or state_of(self.pid) == "T", "the process stops or ends")
        return self.runs

    def calls(self) -> list[tuple[str, str]]:
        """All calls that it made, when it has ended by itself."""
        assert self._answer.poll(PATIENCE)
        found: list[tuple[str, str]] = self._answer.recv()
        assert self.ended_with == 0
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class Node:
    """One node: its slots in `memory`, its ranks, its writer. A lost writer ends a call with WriterLost."""

    def __init__(self, memory: Path, store: Path, key: Key, node: int = 0, nodes: int = 1) -> None:
        self.memory = memory
        self.ranks = (0, 1) if nodes == 1 else (node,)
        self.config = WriterConfig(
            url=str(store), options={}, attempt=str(key.attempt), node=node, nodes=nodes, world=2, ranks=self.ranks,
            keep_last=2, commit_timeout=PATIENCE,
        )  # fmt: skip
        self.links: list[WriterLink] = []

    def start(self, folder: Path, point: Point | None = None, number: int = signal.SIGKILL) -> Process:
        """A writer for this node that gets the signal at `point` of its calls below `folder`."""
        return Process(_write, self.memory, folder, point, number)

    def join(self, process: Process) -> None:
        """Connects all ranks, to this writer and to no other. WriterLost when it dies before."""
        end = time.monotonic() + PATIENCE
        while len(self.links) < len(self.ranks):
            try:
                self.links.append(WriterLink.connect(self.memory))
            except OSError:
                if not process.runs:
                    raise WriterLost(f"the writer ended with {process.ended_with}") from None
                assert time.monotonic() < end, "the writer does not listen"
                time.sleep(0.002)
        for local, link in enumerate(self.links):
            self.hello(link, local)

    def hello(self, link: WriterLink, local: int) -> None:
        link.call("hello", PATIENCE, protocol=control.PROTOCOL, local=local, config=vars(self.config))

    def take(self, key: Key, locals_: Sequence[int] | None = None) -> None:
        """Save as these ranks (by default all) do, until the writer is told that the slot is filled. WriterLost."""
        links = {local: self.links[local] for local in (range(len(self.ranks)) if locals_ is None else locals_)}
        for link in links.values():
            link.call("reserve", PATIENCE, sizes=self.sizes, kept=[])
        slot = {int(link.call("begin", PATIENCE, key=str(key))) for link in links.values()}.pop()
        for local in links:
            fill(Slots(self.memory), slot, key, local, SIZES[self.ranks[local]], rank=self.ranks[local])
        for link in links.values():
            link.tell("filled", key=str(key))

    @property
    def sizes(self) -> list[int]:
        return [SIZES[rank] for rank in self.ranks]

    def hear(self, key: Key, while_: Callable[[], bool] = lambda: True) -> dict[str, Any]:
        """The writer's word about a save; nothing when `while_` ends before. WriterLost."""
        end = time.monotonic() + PATIENCE
        while while_():
            for report in self.links[0].reports(0.05):
                if report["key"] == str(key):
                    return report
            assert time.monotonic() < end, f"the writer has not said what became of {key}"
        return {}

    def leave(self) -> None:
        for link in self.links:
            with suppress(WriterLost):
                link.call("bye", PATIENCE)
        self.drop()

    def drop(self) -> None:
        """The ranks are gone, without a word."""
        for link in self.links:
            link.close()
        self.links.clear()

    def again(self, key: Key) -> Node:
        """The same node for the next attempt."""
        return Node(self.memory, Path(self.config.url), key, self.config.node, self.config.nodes)


def _run(answer: Any, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    work(answer.send, *args)
    os._exit(0)


def _write(answer: Callable[[Any], None], memory: Path, folder: Path, point: Point | None, number: int) -> None:
    calls = Calls(folder, point, number)
    locked = lock_directory(memory, PATIENCE)
    asyncio.run(writer._serve_node(memory, PATIENCE, lambda: locked.is_valid))
    locked.release()
    answer(calls.seen)


def fill_as_rank(
    answer: Callable[[Any], None], node: Node, folder: Path, local: int, key: Key, point: Point | None
) -> None:
    """Save as one rank does, until the writer is told that the slot is filled; for a Process."""
    calls = Calls(folder, point)
    link = WriterLink.connect(node.memory)
    node.hello(link, local)
    link.call("reserve", PATIENCE, sizes=node.sizes, kept=[])
    slot = int(link.call("begin", PATIENCE, key=str(key)))
    fill(Slots(node.memory), slot, key, local, SIZES[node.ranks[local]], rank=node.ranks[local])
    link.call("filled", PATIENCE, key=str(key))
    answer(calls.seen)
