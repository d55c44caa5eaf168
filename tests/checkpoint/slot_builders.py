"""Slots filled as ranks fill them, without torch: the bytes follow from key, rank and size."""

from __future__ import annotations

import random

from everstep.checkpoint.format.manifest import HEADER, Key, part_header
from everstep.checkpoint.slots.slots import Box, PartRecord, Slots


def content(key: Key, rank: int, size: int) -> bytes:
    """The part of a rank, header included."""
    return part_header(key, rank) + random.Random(f"{key} {rank}").randbytes(size - HEADER)


def layout(rank: int, size: int) -> list[Box]:
    """One tensor for each rank."""
    length = size - HEADER
    return [Box(f"tensor.{rank}", "uint8", (length,), (0,), (length,), HEADER, length)]


def fill(slots: Slots, number: int, key: Key, local: int, size: int, rank: int | None = None, world: int = 2) -> bytes:
    """Does what a rank does in a slot that is claimed for `key`; the bytes of its part."""
    rank = local if rank is None else rank
    data = content(key, rank, size)
    with slots[number].part(local).open("r+b") as file:
        file.write(data)
    record = PartRecord(
        key=key,
        rank=rank,
        world=world,
        size=size,
        layout=slots.save_layout(layout(rank, size)),
        model="model",
        checksum="xxh3_64",
        values={"step": key.step, f"rank.{rank}.seed": rank},
    )
    slots[number].record(local, record)
    return data
