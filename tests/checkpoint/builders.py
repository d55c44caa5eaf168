"""A small training of any number of nodes with one rank each, without torch: what it saves, and a reader of its own.

The state of a checkpoint follows from its key, so a reader can tell whether each byte is right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from everstep.checkpoint.catalog.candidates import list_candidates, read_chunk, read_manifest
from everstep.checkpoint.errors import Damaged, Missing
from everstep.checkpoint.format.checksum import compute_checksum
from everstep.checkpoint.format.manifest import (
    HEADER,
    Attempt,
    CheckpointPart,
    Chunk,
    Key,
    Manifest,
    Shard,
    StoredTensor,
    align_offset,
    part_header,
)  # fmt: skip
from everstep.checkpoint.format.values import pack_value
from everstep.checkpoint.publish import commit
from everstep.checkpoint.store.base import Store

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # offsets, sizes, shape of the whole tensor

ROW = 64  # bytes of a row of the tensor that all ranks have a share of


def key(step: int = 10, generation: int = 1, epoch: int = 0) -> Key:
    return Key(Attempt(epoch, generation), step)


@dataclass(frozen=True)
class Training:
    """`rows` of ROW bytes on each rank, in chunks of `chunk` bytes; 1,000 bytes more that rank 0 alone writes."""

    world: int = 2
    rows: int = 40
    chunk: int = 1024
    checksum: str = "xxh3_64"

    def state(self, key: Key) -> dict[str, bytes]:
        """All tensors and values of a checkpoint, as bytes."""
        shards = b"".join(self._shard(key, rank) for rank in range(self.world))
        values: dict[str, object] = {}
        for rank in range(self.world):
            values |= _values(key, rank)
        return {"shared": shards, "own": _random(key, "own", 1000), **_told(values)}

    def part(self, key: Key, rank: int) -> tuple[bytes, Manifest]:
        """The bytes of a rank's part, and what its node says of it."""
        shared = ((rank * self.rows, 0), (self.rows, ROW), (self.world * self.rows, ROW))
        tensors: dict[str, tuple[bytes, Box]] = {"shared": (self._shard(key, rank), shared)}
        if rank == 0:
            tensors["own"] = (_random(key, "own", 1000), ((0,), (1000,), (1000,)))
        body = bytearray(part_header(key, rank, self.checksum))
        described = {}
        for name, (data, (offsets, sizes, shape)) in tensors.items():
            body.extend(b"\0" * (align_offset(len(body)) - len(body)))
            shard = Shard(offsets, sizes, tuple(self._chunks(data, len(body))))
            described[name] = StoredTensor("uint8", shape, (shard,))
            body.extend(data)
        body.extend(b"\0" * (align_offset(len(body)) - len(body)))
        part = CheckpointPart(key.part_name(rank), len(body), compute_checksum(self.checksum, body[:HEADER]))
        values = {name: pack_value(value) for name, value in _values(key, rank).items()}
        return bytes(body), Manifest(key, self.world, 1, "model", self.checksum, 1.5, (part,), described, values)

    def write(self, store: Store, key: Key, rank: int) -> None:
        """Store and announce the part of a rank, as its node does in a save."""
        data, manifest = self.part(key, rank)
        store.put(key.part_name(rank), pieces(data), len(data))
        commit.announce_node(store, rank, manifest)

    def commit(self, store: Store, key: Key, *, fenced: Callable[[], str | None] = lambda: None) -> Manifest:
        """Commit as node 0 does when all nodes have written, and return the committed manifest."""
        commit.commit_checkpoint(store, key, self.world, fenced=fenced, timeout=0.0)
        return read_manifest(store, key)

    def save(self, store: Store, key: Key) -> Manifest:
        for rank in range(self.world):
            self.write(store, key, rank)
        return self.commit(store, key)

    def _shard(self, key: Key, rank: int) -> bytes:
        return _random(key, str(rank), self.rows * ROW)

    def _chunks(self, data: bytes, at: int) -> list[Chunk]:
        cuts = range(0, len(data), self.chunk)
        parts = [(at + start, data[start : start + self.chunk]) for start in cuts]
        return [Chunk(0, start, len(piece), compute_checksum(self.checksum, piece)) for start, piece in parts]


@dataclass(frozen=True)
class Loaded:
    """The newest checkpoint that is good, None if there is none; `state` as Training.state() has it; why not others."""

    key: Key | None
    state: dict[str, bytes]
    fell_back: tuple[str, ...]


def load(store: Store) -> Loaded:
    """The newest checkpoint of which every byte is verified as it is read."""
    reasons: list[str] = []
    for each in list_candidates(store):
        try:
            manifest = read_manifest(store, each)
            return Loaded(each, _read(store, manifest), tuple(reasons))
        except (Damaged, Missing) as error:
            reasons.append(str(error))
    return Loaded(None, {}, tuple(reasons))


def is_good(training: Training, loaded: Loaded) -> bool:
    """Bit for bit what was saved under its key."""
    return loaded.key is not None and loaded.state == training.state(loaded.key)


def _read(store: Store, manifest: Manifest) -> dict[str, bytes]:
    state = {}
    for name, tensor in manifest.tensors.items():
        data = bytearray()
        # Cut along the first dimension only: shards in order of their offsets are the rows in order.
        for shard in sorted(tensor.shards, key=lambda shard: shard.offsets):
            for chunk in shard.chunks:
                into = bytearray(chunk.length)
                read_chunk(store, manifest, chunk, memoryview(into))
                data += into
        state[name] = bytes(data)
    return {**state, **_told(manifest.values)}


def pieces(data: bytes) -> Iterable[bytes]:
    half = len(data) // 2
    return [data[:half], data[half:]]


def _told(values: dict[str, object]) -> dict[str, bytes]:
    return {name: repr(value).encode() for name, value in values.items()}


def _values(key: Key, rank: int) -> dict[str, object]:
    return {"step": key.step, f"rank.{rank}.seed": f"{key}/{rank}"}


def _random(key: Key, what: str, size: int) -> bytes:
    return random.Random(f"{key}/{what}").randbytes(size)


def node_manifest(rank: int, shards: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> Manifest:
    """Return the manifest of a node that has only these (offsets, sizes) of the tensor `w`."""
    _, manifest = Training(world=2, rows=128).part(key(), rank)
    boxes = []
    for offsets, sizes in shards:
        volume = 1
        for size in sizes:
            volume *= size
        boxes.append(Shard(offsets, sizes, (Chunk(0, HEADER, volume, "0" * 16),) if volume else ()))
    return replace(manifest, tensors={"w": StoredTensor("uint8", shape, tuple(boxes))})


def newer(manifest: bytes) -> bytes:
    """Return what a later version of everstep may write instead."""
    fields = json.loads(manifest.split(b"\n")[0]) | {"format": 77}
    first = json.dumps(fields).encode() + b"\n"
    return first + f"xxh3_64 {compute_checksum('xxh3_64', first)}\n".encode()
