"""Manifests and states for tests, in a line each."""

from __future__ import annotations

from everstep.checkpoint.checksum import digest
from everstep.checkpoint.format import (
    HEADER,
    Attempt,
    Chunk,
    Key,
    Manifest,
    Part,
    Shard,
    Tensor,
    aligned,
    chunk_lengths,
    part_header,
)  # fmt: skip


def key(step: int = 10, generation: int = 1, epoch: int = 0) -> Key:
    return Key(Attempt(epoch, generation), step)


def written(
    key: Key,
    rank: int,
    tensors: dict[str, bytes],
    *,
    world: int = 1,
    values: dict[str, object] | None = None,
    checksum: str = "xxh3_64",
    model: str = "m",
) -> tuple[bytes, Manifest]:
    """A part with one-dimensional tensors of bytes, and the manifest of the rank that wrote it."""
    body = bytearray(part_header(key, rank, checksum))
    described: dict[str, Tensor] = {}
    for name, data in tensors.items():
        body.extend(b"\0" * (aligned(len(body)) - len(body)))
        chunks: list[Chunk] = []
        for length in chunk_lengths(len(data)):
            at = sum(chunk.length for chunk in chunks)
            chunks.append(Chunk(0, len(body) + at, length, digest(checksum, data[at : at + length])))
        body.extend(data)
        described[name] = Tensor("uint8", (len(data),), (Shard((0,), (len(data),), tuple(chunks)),))
    part = Part(key.part_name(rank), len(body), digest(checksum, bytes(body[:HEADER])))
    return bytes(body), Manifest(key, world, 1, model, checksum, 1.5, (part,), described, values or {})
