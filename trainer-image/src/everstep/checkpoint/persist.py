"""From a filled slot to bytes that are durable in a store: sum every chunk, then put parts and node manifest."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from everstep.checkpoint.checksum import digest
from everstep.checkpoint.commit import announce
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format import CHUNK, HEADER, Chunk, Manifest, Part, Shard, Tensor, chunk_lengths
from everstep.checkpoint.merging import join
from everstep.checkpoint.slots import Record, Slot, Slots
from everstep.checkpoint.store.base import Store


class GivenUp(CheckpointError):
    """The save was abandoned while it was being stored."""


class Progress:
    """What a save has done, for who watches it from another thread; `give_up` ends it at its next chunk."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.given_up: str | None = None

    def check(self) -> None:
        """GivenUp when nobody wants the save any more."""
        if self.given_up is not None:
            raise GivenUp(self.given_up)

    def step(self) -> None:
        """Something was done. GivenUp."""
        self.check()
        self.at = time.monotonic()


def sum_slot(slots: Slots, slot: Slot, pool: Executor, progress: Progress) -> Manifest:
    """Sums what the ranks have filled in and makes the slot whole; its node manifest. Conflict: its ranks disagree."""
    records = slot.records()
    if records is None:
        raise CheckpointError(f"slot {slot.path} is not filled")
    created = time.time()

    def sum_part(local: int) -> Manifest:
        return _sum_part(slots, slot, local, records[local], created, progress)

    manifest = join(list(pool.map(sum_part, range(len(records)))))
    slot.complete(manifest)
    return manifest


def store_slot(store: Store, slot: Slot, node: int, manifest: Manifest, pool: Executor, progress: Progress) -> None:
    """Puts the parts and then the node manifest: durable on return."""

    def put(local: int) -> None:
        part = manifest.parts[local]
        with _mapped(slot, local, part.size) as data:
            store.put(part.name, _pieces(data, progress), part.size)

    list(pool.map(put, range(len(manifest.parts))))
    progress.step()
    announce(store, node, manifest)


def _sum_part(slots: Slots, slot: Slot, local: int, record: Record, created: float, progress: Progress) -> Manifest:
    tensors: dict[str, Tensor] = {}
    with _mapped(slot, local, record.size) as data:
        header = digest(record.checksum, data[:HEADER])
        for box in slots.layout(record.layout):
            chunks, offset = [], box.offset
            for length in chunk_lengths(box.length):
                chunks.append(Chunk(0, offset, length, digest(record.checksum, data[offset : offset + length])))
                offset += length
                progress.step()
            shard = Shard(box.offsets, box.sizes, tuple(chunks))
            known = tensors.get(box.tensor)
            tensors[box.tensor] = Tensor(box.dtype, box.shape, (*(known.shards if known else ()), shard))
    return Manifest(
        key=record.key,
        world=record.world,
        nodes=1,
        model=record.model,
        checksum=record.checksum,
        created=created,
        parts=(Part(record.key.part_name(record.rank), record.size, header),),
        tensors=tensors,
        values=record.values,
    )


def _pieces(data: memoryview, progress: Progress) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK):
        progress.step()
        yield data[start : start + CHUNK]


@contextmanager
def _mapped(slot: Slot, local: int, size: int) -> Iterator[memoryview]:
    """The bytes of a part, without a copy."""
    with (
        slot.part(local).open("rb") as file,
        mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as pages,
        memoryview(pages) as view,
    ):
        yield view
