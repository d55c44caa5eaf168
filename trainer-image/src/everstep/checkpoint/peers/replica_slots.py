"""The copies of another node's slots that this node keeps: slots of their own, below the node's own ones.

    <directory>/peer/<slot>/claim.json, <local>.part, slot.json, whole, lock

A copy is whole only when every chunk of it has the sum that its node manifest says; until then it is nothing.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError, Damaged, NoSlot
from everstep.checkpoint.format.checksum import compute_checksum
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import HEADER, Chunk, Manifest, decode_manifest
from everstep.checkpoint.host import available_memory
from everstep.checkpoint.peers.peer_link import TIMEOUT, PeerLink
from everstep.checkpoint.slots.own_files import COPIES
from everstep.checkpoint.slots.slots import READ_TIMEOUT, Claim, Slot, Slots

_POLL = 0.02  # seconds


class CopyRejected(CheckpointError):
    """Raised when this node does not take the copy; the message says why."""


def open_peer_copies(directory: Path) -> Slots:
    """Return the copies that the node with this slots' directory keeps, there or not."""
    return Slots(directory / COPIES)


class Copies:
    """Takes one copy at a time. The newest whole one stays while the next one comes, if there are two slots."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._slots = open_peer_copies(directory)
        self._turn = threading.Lock()
        self._present: tuple[Key, PeerLink] | None = None

    def need(self, sizes: Sequence[int], count: int) -> int:
        """Return the bytes of memory that `count` copies with parts of these sizes would take beyond what is there."""
        return self._slots.need(sizes, count)

    def reserve(self, sizes: Sequence[int], count: int) -> None:
        """Allocate the copies. Raises InsufficientMemory."""
        Slots.create(self._slots.directory, 0)
        self._slots.reserve(sizes, count)

    def remove_surplus(self, count: int) -> None:
        """Remove copies that an earlier run with more slots has kept, but the newest whole one of all."""
        if not self._turn.acquire(blocking=False):
            return  # one is coming, and may be in one of them
        try:
            self._remove_surplus(count)
        finally:
            self._turn.release()

    def _remove_surplus(self, count: int) -> None:
        whole = self._slots.whole()
        newest = whole[0][0].number if whole else None
        for slot in self._slots.surplus(count):
            if slot.number != newest:
                with suppress(OSError):
                    self._slots.move_away(slot)
        self._slots.clear_removed()

    def take(self, link: PeerLink, claim: Claim, data: bytes, count: int) -> None:
        """Receive the parts of a node manifest (`data`) and verify them.

        A copy of an older checkpoint that still comes makes way; one of a newer checkpoint is never given up for this.

        Raises:
            CopyRejected: Before anything is received.
            Damaged: A part is not what the manifest says.
            PeerLost: The connection ends.
        """
        manifest = decode_manifest(data, f"the node manifest of {claim.key}")
        if manifest.key != claim.key or claim.locals != len(manifest.parts):
            raise CopyRejected("the node manifest is of something else")
        present = self._present
        if present is not None and present[0] < claim.key:
            present[1].abort()  # its sender may be frozen
        if not self._turn.acquire(timeout=TIMEOUT / 2):
            raise CopyRejected(f"{present[0] if present else 'another checkpoint'} is being copied here")
        self._present = (claim.key, link)
        try:
            self._take(link, claim, manifest, count)
        finally:
            self._present = None
            self._turn.release()

    def _take(self, link: PeerLink, claim: Claim, manifest: Manifest, count: int) -> None:
        whole = self._slots.whole()
        if whole and whole[0][1].key > claim.key:
            raise CopyRejected(f"a newer copy is here, {whole[0][1].key}")
        sizes = [part.size for part in manifest.parts]
        need = self.need(sizes, count)
        if need > 0:
            available_memory.check_memory(self._directory, need, copies=0, kept=count)
            self.reserve(sizes, count)
        slot = self._claim_slot(claim, count)
        try:
            link.tell({"ok": None})  # now the bytes
            chunks = _by_part(manifest)
            for local, part in enumerate(manifest.parts):
                _receive_part(link, slot.part(local), part.size, manifest, chunks[local])
            slot.complete(manifest)
            self._remove_surplus(count)
        except BaseException:
            with suppress(OSError):
                slot.release()
            raise

    def _claim_slot(self, claim: Claim, count: int) -> Slot:
        """Claim a slot for a copy, after waiting a while for processes that restore. Refused."""
        until = time.monotonic() + READ_TIMEOUT
        while True:
            try:
                slot = self._find_slot(count)
                slot.claim(claim)
            except NoSlot as error:
                if time.monotonic() >= until:
                    raise CopyRejected(str(error)) from error
                time.sleep(_POLL)
            else:
                return slot

    def _find_slot(self, count: int) -> Slot:
        slots, whole = self._slots.first(count), self._slots.whole()
        newest = whole[0][0].number if whole and len(slots) > 1 else None
        age = {slot.number: i + 1 for i, (slot, _) in enumerate(whole)}  # the oldest has the greatest
        free = [slot for slot in slots if slot.number != newest and not slot.is_read]
        if not free:
            raise NoSlot("every copy here is being read")
        # What is not whole first, then the oldest.
        return max(free, key=lambda slot: (slot.number not in age, age.get(slot.number, 0)))


def _by_part(manifest: Manifest) -> list[list[Chunk]]:
    found: list[list[Chunk]] = [[Chunk(i, 0, HEADER, part.header)] for i, part in enumerate(manifest.parts)]
    for tensor in manifest.tensors.values():
        for shard in tensor.shards:
            for chunk in shard.chunks:
                found[chunk.part].append(chunk)
    return [sorted(chunks, key=lambda chunk: chunk.offset) for chunks in found]


def _receive_part(link: PeerLink, path: Path, size: int, manifest: Manifest, chunks: Sequence[Chunk]) -> None:
    """A part into its file; each chunk is summed as soon as it has come, while it is in the processor's cache."""
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), size)
    with pages, memoryview(pages) as data:
        at = 0
        for chunk in chunks:
            end = chunk.offset + chunk.length
            if chunk.offset < at or end > size:
                raise Damaged(manifest.parts[chunk.part].name, "its chunks do not lie one after the other")
            with data[at:end] as piece:
                link.fill(piece)
            with data[chunk.offset : end] as piece:
                if compute_checksum(manifest.checksum, piece) != chunk.sum:
                    raise Damaged(manifest.parts[chunk.part].name, f"bytes {chunk.offset} to {end} came otherwise")
            at = end
        with data[at:size] as piece:
            link.fill(piece)
