"""Rows `restore-cold`, `-warm`, `-warm-anew`, `-node` and `-peer`: from the store without and with the page cache, from
this node's memory and from another's, each until the tensors of a script hold the state."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import floors, residency, state
from benchmarks.checkpoint.link import shaped
from benchmarks.checkpoint.wire import wire
from benchmarks.interval import REPEATS, Interval
from benchmarks.measure import alternate
from everstep.checkpoint.peers.discovery import Peers
from everstep.checkpoint.peers.peer_server import iterate_held_slots
from everstep.checkpoint.ranks.topology import Topology
from everstep.checkpoint.restore.proposals import make_proposal
from everstep.checkpoint.restore.restorer import Restorer
from everstep.checkpoint.session.checkpointer import Checkpointer
from everstep.checkpoint.session.options import MemoryOptions
from everstep.checkpoint.slots import slot_marks, slots
from everstep.coordination.consensus import Consensus
from everstep.coordination.kv_store import LocalKVStore

# Times a plain read, the same, one into new memory, a copy, as many bytes through a socket over a link of 10 Gbit/s.
TARGETS = {
    "restore-cold": 1.3,
    "restore-warm": 1.3,
    "restore-warm-anew": 1.3,
    "restore-node": 1.5,
    "restore-peer": 1.1,
}
ALLOWANCE = 0.02  # seconds; a restore agrees, decodes and gives values back, however small the state is

SECRET = "of this benchmark"
ALONE = Topology(0, 1, 0, 1, (0,))


class _Vote(Consensus):
    """A consensus of this rank alone, which hears what another node offers; that one's rank is no part of what is
    measured."""

    def __init__(self, offer: dict[str, Any]) -> None:
        super().__init__(LocalKVStore(), 0, 1)
        self._offer = offer
        self._first = True

    def agree(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        first, self._first = self._first, False
        theirs = [{**mine, "offer": self._offer}] if first else []
        return super().agree(mine, lambda messages: decide([*messages, *theirs]))


def rows(size: int, name: str, folder: Path, wanted: Collection[str]) -> Iterator[Interval]:
    """One checkpoint of `size` bytes, restored into the model that it was saved from.

    What comes from elsewhere is restored as by a new process, whose optimizer has no state yet; what is in this node's
    memory, where the floor is a copy into memory that is there, into the optimizer that it was saved from, too.
    """
    objects = state.made(size)
    memory, nothing = _shared(folder / "memory"), folder / "nothing"
    with ExitStack() as stack:
        ckpt = stack.enter_context(
            Checkpointer(folder / "ours", every="365d", memory=MemoryOptions(directory=memory, slots=1))
        )
        ckpt.track(**objects)
        ckpt.save(1)
        ckpt.wait()
        [part] = (folder / "ours" / "data").glob("*/*/*.part")
        length = part.stat().st_size
        buffer = stack.enter_context(floors.buffer(length))

        def restore(
            tier: str,
            place: Path,
            topology: Topology,
            consensus: Consensus,
            peers: Peers | None = None,
            *,
            anew: bool = True,
        ) -> float:
            into = state.started(objects) if anew else objects
            restorer = Restorer(into, ckpt.store, topology, consensus, place, peers=peers)
            slots._decode_slot_manifest.cache_clear()  # a new process has read no manifest yet
            began = time.perf_counter()
            restored = restorer.restore()
            took = time.perf_counter() - began
            assert restored.tier == tier, restored
            return took

        def read() -> float:
            return floors.read(part, buffer)

        def from_store(*, anew: bool = True) -> float:
            return restore("store", nothing, ALONE, Consensus(LocalKVStore(), 0, 1), anew=anew)

        def cold(arm: Callable[[], float]) -> Callable[[], float]:
            def measured() -> float:
                residency.evict(part)
                share = residency.resident(part)
                assert share < 0.01, f"{share:.0%} of {part} cannot be driven out of the page cache"
                return arm()

            return measured

        arms: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
            "restore-cold": (cold(from_store), cold(read)),
            "restore-warm": (lambda: from_store(anew=False), read),
            "restore-warm-anew": (from_store, lambda: floors.read_anew(part, length)),
        }
        sources = state.tensors(objects)
        verify(memory)
        arms["restore-node"] = (
            lambda: restore("memory", memory, ALONE, Consensus(LocalKVStore(), 0, 1), anew=False),
            lambda: floors.copy(buffer, sources),
        )
        if "restore-peer" in wanted:
            # Node 1 of this run holds the only share; we are node 0, whose memory is empty.
            link = stack.enter_context(shaped())
            ends = stack.enter_context(wire(memory, memory / "0" / "0.part", length, SECRET, link))
            offer = make_proposal(memory, Topology(1, 2, 1, 2, (1,))) or {}
            peers = Peers(SECRET, (ends.writer, ends.writer), 1, ())
            arms["restore-peer"] = (
                lambda: restore("peer", nothing, Topology(0, 1, 0, 2, (0,)), _Vote(offer), peers, anew=False),
                lambda: floors.receive(ends.plain, buffer, length),
            )
        for kind, (ours, floor) in arms.items():
            if kind in wanted:
                row = Interval(f"{kind}-{name}", "s", TARGETS[kind], allowance=ALLOWANCE)
                alternate(row, ours, floor, REPEATS)
                yield row
    shutil.rmtree(folder / "ours")


def verify(memory: Path) -> None:
    """Mark the slots as verified, as the writer does while ranks are started again."""
    for slot, manifest in iterate_held_slots(memory):
        mark = slot_marks.verify_slot(slot, manifest)
        assert mark is not None, slot.path
        slot_marks.leave_mark(slot, mark)


def _shared(folder: Path) -> Path:
    """Return the same name in shared memory."""
    return Path("/dev/shm") / f"everstep-bench-{folder.parent.name}-{folder.name}"
