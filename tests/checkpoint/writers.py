"""Writers as real processes, and the ranks of their nodes as far as a writer sees them. Without torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from everstep.checkpoint.catalog.candidates import verify_checkpoint
from everstep.checkpoint.format.keys import RUN, Key
from everstep.checkpoint.peers import replica_slots
from everstep.checkpoint.slots.slots import Slots
from everstep.checkpoint.store.base import Store, open_store
from everstep.checkpoint.writer import control
from everstep.checkpoint.writer.control import WriterConfig
from tests.checkpoint.slot_builders import content, fill

SIZES = [300_000, 9_000]
PATIENCE = 20.0
SECRET = "only the ranks of this run know it"


def until(true: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return found


class Node:
    """The ranks of one node."""

    def __init__(self, directory: Path, config: WriterConfig, linger: float) -> None:
        self.directory = directory
        self.config = config
        self.links = [control.join_writer(directory, config, local, linger) for local in range(len(config.ranks))]
        self.slots = Slots(directory)
        self.pid = self.links[0].pid
        for link in self.links:
            link.call("reserve", sizes=SIZES[: len(config.ranks)], kept=[])

    def meet(self, keeper: Node, kept: list[int]) -> None:
        """Says where copies of our slots go, and what sizes the parts have that are kept here."""
        port = keeper.links[0].port
        assert port is not None
        self.config = replace(self.config, keeper=("127.0.0.1", port))
        for local, link in enumerate(self.links):
            link.hello(self.config, local)
            link.call("reserve", sizes=SIZES[: len(self.links)], kept=kept)

    def copies(self) -> list[Key]:
        """Return the keys of the checkpoints of which this node keeps a whole copy, newest first."""
        return [manifest.key for _, manifest in replica_slots.open_peer_copies(self.directory).whole()]

    def begin(self, key: Key) -> int:
        numbers = {link.call("begin", key=str(key)) for link in self.links}
        assert len(numbers) == 1
        return int(numbers.pop())

    def fill(self, key: Key, number: int, local: int) -> None:
        rank = self.config.ranks[local]
        fill(self.slots, number, key, local, SIZES[local], rank=rank, world=self.config.world)
        self.links[local].call("filled", key=str(key))

    def save(self, key: Key) -> int:
        number = self.begin(key)
        for local in range(len(self.links)):
            self.fill(key, number, local)
        return number

    def report(self, event: str, local: int = 0) -> dict[str, Any]:
        """The next report of this kind; others before it are passed over."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for report in self.links[local].reports(0.1):
                if report["event"] == event:
                    return report
        raise AssertionError(f"the writer has not said {event}: {(self.directory / control.LOG).read_text()}")

    def die(self) -> None:
        for link in self.links:
            link.close()

    def leave(self) -> None:
        for link in self.links:
            link.call("bye")
        self.die()

    @property
    def runs(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().split(")")[1].split()[0] != "Z"
        except FileNotFoundError:
            return False


class Site:
    """A store, and nodes that save into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store: Store = open_store(folder / "store")
        self.pids: list[int] = []

    def config(self, **fields: Any) -> WriterConfig:
        common = WriterConfig(self.store.url, {}, "0000000000.0000000001", 0, 1, 2, (0, 1), commit_timeout=PATIENCE)
        return replace(common, **fields)

    def node(self, linger: float = 30.0, **fields: Any) -> Node:
        config = self.config(**fields)
        if config.run:  # as a session does that claims the store
            open_store(self.store.url).put_if_absent(RUN, config.run.encode())
        made = Node(self.folder / f"memory-{config.node}", config, linger)
        self.pids.append(made.pid)
        return made

    def good(self, key: Key, ranks: int = 2) -> bool:
        manifest = verify_checkpoint(self.store, key)
        parts = {part.name: self.store.read(part.name) for part in manifest.parts}
        return parts == {key.part_name(rank): content(key, rank, SIZES[rank]) for rank in range(ranks)}

    def pair(self, **fields: Any) -> tuple[Node, Node]:
        """Two nodes with one rank each, which keep each other's copies."""
        common = {"nodes": 2, "secret": SECRET, **fields}
        first, second = (self.node(node=node, ranks=(node,), **common) for node in (0, 1))
        first.meet(second, SIZES[:1])
        second.meet(first, SIZES[:1])
        return first, second

    def end(self) -> None:
        """Ends all writers."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
