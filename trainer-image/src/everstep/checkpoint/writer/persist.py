"""Make the bytes of a filled slot durable in a store: sum every chunk, then put parts and node manifest."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from contextlib import suppress
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError, Full, StoreError
from everstep.checkpoint.format.checksum import compute_checksum
from everstep.checkpoint.format.manifest import (
    CHUNK,
    HEADER,
    CheckpointPart,
    Chunk,
    Manifest,
    Shard,
    StoredTensor,
    chunk_lengths,
    encode_manifest,
)
from everstep.checkpoint.format.merging import join_manifests
from everstep.checkpoint.format.nested_names import check_states
from everstep.checkpoint.publish.commit import announce_node, is_node_announced
from everstep.checkpoint.slots.slots import Box, PartRecord, Slot, Slots
from everstep.checkpoint.store.base import Store


class GivenUp(CheckpointError):
    """The save was abandoned while it was being stored."""


class SaveProgress:
    """The progress of a save, to be watched from another thread; `give_up` ends the save at its next chunk."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.given_up: str | None = None

    def check(self) -> None:
        """Raise GivenUp when nobody wants the save any more."""
        if self.given_up is not None:
            raise GivenUp(self.given_up)

    def step(self) -> None:
        """Note that something was done. Raises GivenUp."""
        self.check()
        self.at = time.monotonic()


class Mappings:
    """Parts of slots in this process's memory, mapped once: a page costs more to map than to sum or to write."""

    def __init__(self) -> None:
        self._pages: dict[Path, tuple[os.stat_result, mmap.mmap]] = {}
        self._lock = threading.Lock()

    def view(self, path: Path, size: int) -> memoryview:
        """Return the first `size` bytes of a part."""
        with self._lock:
            found, pages = self._pages.get(path, (None, b""))
            # The slot may have been removed and made anew: what is mapped would be stored as what was saved since.
            if found is None or len(pages) < size or not os.path.samestat(found, path.stat()):
                with path.open("rb") as file:
                    # All of it, at once, so that it stays mapped whatever the size of the next one is.
                    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                    pages = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
                    self._pages[path] = os.fstat(file.fileno()), pages
        return memoryview(pages)[:size]

    def forget(self, slot: Slot) -> None:
        """Unmap the parts of a slot that is removed: their memory is given back, and a later slot has other files."""
        with self._lock:
            for path in [path for path in self._pages if path.parent == slot.path]:
                del self._pages[path]


def sum_slot(slots: Slots, slot: Slot, mappings: Mappings, pool: Executor, progress: SaveProgress) -> Manifest:
    """Sum what the ranks have filled in, make the slot whole, and return its node manifest.

    Raises:
        WriterConflict: Its ranks disagree.
    """
    records = slot.records()
    if records is None:
        raise CheckpointError(f"slot {slot.path} is not filled")
    created = time.time()

    def sum_part(local: int) -> Manifest:
        data = mappings.view(slot.part(local), records[local].size)
        return _sum_part(slots.layout(records[local].layout), data, records[local], created, progress)

    manifest = join_manifests(list(pool.map(sum_part, range(len(records)))))
    check_states(manifest.tensors, manifest.values)
    slot.complete(manifest)
    return manifest


def store_slot(
    store: Store, slot: Slot, node: int, manifest: Manifest, mappings: Mappings, pool: Executor, progress: SaveProgress
) -> None:
    """Put the parts and then the node manifest: durable on return. See store_again for what was begun before."""

    def put(local: int) -> None:
        part = manifest.parts[local]
        store.put(part.name, _iterate_pieces(mappings.view(slot.part(local), part.size), progress), part.size)

    puts = [pool.submit(put, local) for local in range(len(manifest.parts))]
    done, others = wait(puts, return_when=FIRST_EXCEPTION)
    # Whoever stores this again, or another save under the same names, is to be alone there.
    wait([each for each in others if not each.cancel()])
    try:
        for each in done:
            each.result()
    except Full:
        # Room for whoever comes next: nobody has heard of the parts that are there, and the next try writes all anew.
        with suppress(StoreError):
            store.delete([part.name for part in manifest.parts])
        raise
    progress.step()
    announce_node(store, node, manifest)


def store_again(
    store: Store, slot: Slot, node: int, manifest: Manifest, mappings: Mappings, pool: Executor, progress: SaveProgress
) -> None:
    """Like store_slot, for a slot that a writer which has died since may have begun to store. WriterConflict."""
    if is_node_announced(store, node, manifest):
        return
    # Maybe torn, and nobody else has heard of them; a name in a store is written once.
    # A mark that they were verified is not of what is written now.
    name = manifest.key.node_manifest_name(node, compute_checksum(manifest.checksum, encode_manifest(manifest)))
    store.delete([manifest.key.mark_name(name), *(part.name for part in manifest.parts)])
    store_slot(store, slot, node, manifest, mappings, pool, progress)


def _sum_part(
    boxes: Sequence[Box], data: memoryview, record: PartRecord, created: float, progress: SaveProgress
) -> Manifest:
    tensors: dict[str, StoredTensor] = {}
    for box in boxes:
        chunks, offset = [], box.offset
        for length in chunk_lengths(box.length):
            chunks.append(Chunk(0, offset, length, compute_checksum(record.checksum, data[offset : offset + length])))
            offset += length
            progress.step()
        shard = Shard(box.offsets, box.sizes, tuple(chunks))
        known = tensors.get(box.tensor)
        tensors[box.tensor] = StoredTensor(box.dtype, box.shape, (*(known.shards if known else ()), shard))
    return Manifest(
        key=record.key,
        world=record.world,
        nodes=1,
        model=record.model,
        checksum=record.checksum,
        created=created,
        parts=(
            CheckpointPart(
                record.key.part_name(record.rank), record.size, compute_checksum(record.checksum, data[:HEADER])
            ),
        ),
        tensors=tensors,
        values=record.values,
    )


def _iterate_pieces(data: memoryview, progress: SaveProgress) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK):
        progress.step()
        yield data[start : start + CHUNK]
