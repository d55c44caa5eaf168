"""Manifests and how they are written: where every byte of a tensor is, and its checksums.

A node writes one of what it has stored; the index of the checkpoint (index.py) names these. Pure: no store, no clock.
docs/reference/checkpoint-format.md is the same for who writes a reader in another language.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

from everstep.checkpoint.errors import Damaged, Incomplete, WriterConflict
from everstep.checkpoint.format import lines
from everstep.checkpoint.format.checksum import ALGORITHMS, DEFAULT, get_checksum_width
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.format.lines import FORMAT, is_sum, require_number, require_numbers, require_text

__all__ = [
    "ALIGN",
    "CHUNK",
    "FORMAT",
    "HEADER",
    "Attempt",
    "CheckpointPart",
    "Chunk",
    "Damaged",
    "Incomplete",
    "Key",
    "Manifest",
    "Shard",
    "StoredTensor",
    "WriterConflict",
    "align_offset",
    "chunk_lengths",
    "decode_manifest",
    "encode_manifest",
    "get_itemsize",
    "part_header",
    "writer_of",
]  # fmt: skip

MAGIC = b"EVERSTEP"
HEADER = 4096  # bytes before the first tensor of a part
ALIGN = 64  # bytes; every shard begins at a multiple
CHUNK = 8 << 20  # bytes at most

_WRITER = 300  # characters at most of whose a part is; in JSON up to twelve bytes each

_ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip

DTYPES = frozenset(_ITEMSIZE)  # names of the types that a tensor of a checkpoint may have


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [offset, offset + length) of the file of `parts[part]`; `sum` in hex."""

    part: int
    offset: int
    length: int
    sum: str


@dataclass(frozen=True, slots=True)
class Shard:
    """The box [offsets, offsets + sizes) of a tensor; its chunks, one after the other, are its row-major bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`dtype` as torch prints it without "torch."; `shape` of the whole tensor in elements."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """A file of raw tensor bytes: its name in the store, its size in bytes, the checksum of its header in hex."""

    name: str
    size: int
    header: str


@dataclass(frozen=True)
class Manifest:
    """The bytes that one node wrote (`nodes` is 1), or that several or all nodes of a checkpoint did (`nodes`: all of
    them).

    `values` are packed (see values.py).
    """

    key: Key
    world: int
    nodes: int
    model: str
    checksum: str
    created: float
    parts: tuple[CheckpointPart, ...]
    tensors: dict[str, StoredTensor]
    values: dict[str, object]


def get_itemsize(dtype: str) -> int:
    """Return the bytes of one element; ValueError for a dtype that the format does not know."""
    size = _ITEMSIZE.get(dtype)
    if size is None:
        raise ValueError(f"the format knows no tensors of {dtype}")
    return size


def align_offset(offset: int) -> int:
    """Return the first offset at or after this one where a shard may begin."""
    return -(-offset // ALIGN) * ALIGN


def chunk_lengths(size: int) -> list[int]:
    """Return the lengths of the chunks into which `size` bytes of a shard are cut: whole chunks and a rest."""
    return [min(CHUNK, size - start) for start in range(0, size, CHUNK)]


def part_header(key: Key, rank: int, checksum: str = DEFAULT, *, writer: str = "") -> bytes:
    """Return the first HEADER bytes of a part.

    They are enough to tell what a stray file is, and whose where `writer` says so.
    """
    fields = {
        "format": FORMAT,
        "attempt": str(key.attempt),
        "step": key.step,
        "rank": rank,
        "checksum": checksum,
        **({"writer": writer[:_WRITER]} if writer else {}),
    }
    return (MAGIC + lines.encode_line(fields)).ljust(HEADER, b"\0")


def writer_of(header: bytes) -> str:
    """Return who wrote a part, by its first HEADER bytes; an empty text where they do not say so."""
    try:
        return lines.require_text(json.loads(header.removeprefix(MAGIC).partition(b"\n")[0])["writer"])
    except (ValueError, KeyError, TypeError):
        return ""


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest; ValueError when it contradicts itself."""
    _check_manifest(manifest)
    return lines.seal_lines(_to_plain_manifest(manifest), manifest.checksum)


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Return the manifest that encode_manifest() gave `data`; arguments and errors as lines.unseal_lines() has them."""
    fields = lines.unseal_lines(data, name)
    # From here on it is what somebody wrote; an error is a writer's mistake.
    try:
        manifest = _to_typed_manifest(fields)
        _check_manifest(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(name, f"has a checksum that holds but no manifest of format {FORMAT}: {error!r}") from error
    return manifest


def _to_plain_manifest(manifest: Manifest) -> dict[str, Any]:
    return {
        "attempt": str(manifest.key.attempt),
        "step": manifest.key.step,
        "world": manifest.world,
        "nodes": manifest.nodes,
        "model": manifest.model,
        "checksum": manifest.checksum,
        "created": manifest.created,
        "parts": [{"name": part.name, "size": part.size, "header": part.header} for part in manifest.parts],
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "shards": [
                    {
                        "offsets": shard.offsets,
                        "sizes": shard.sizes,
                        "chunks": [(each.part, each.offset, each.length, each.sum) for each in shard.chunks],
                    }
                    for shard in tensor.shards
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
        "values": manifest.values,
    }


def _to_typed_manifest(fields: dict[str, Any]) -> Manifest:
    return Manifest(
        key=Key(Attempt.parse(fields["attempt"]), require_number(fields["step"])),
        world=require_number(fields["world"]),
        nodes=require_number(fields["nodes"]),
        model=require_text(fields["model"]),
        checksum=require_text(fields["checksum"]),
        created=lines.require_seconds(fields["created"]),
        parts=tuple(
            CheckpointPart(require_text(each["name"]), require_number(each["size"]), require_text(each["header"]))
            for each in fields["parts"]
        ),
        tensors={
            name: StoredTensor(
                require_text(each["dtype"]),
                require_numbers(each["shape"]),
                tuple(_parse_shard(box) for box in each["shards"]),
            )
            for name, each in fields["tensors"].items()
        },
        values=dict(fields["values"].items()),
    )


def _parse_shard(fields: dict[str, Any]) -> Shard:
    chunks = []
    for *place, sum_ in fields["chunks"]:
        part, offset, length = require_numbers(place)
        chunks.append(Chunk(part, offset, length, require_text(sum_)))
    return Shard(require_numbers(fields["offsets"]), require_numbers(fields["sizes"]), tuple(chunks))


def _check_manifest(manifest: Manifest) -> None:
    """A reader trusts these: it computes addresses and sizes from them. ValueError says what does not hold."""
    if manifest.checksum not in ALGORITHMS:
        raise ValueError(f"no such checksum: {manifest.checksum}")
    if not (manifest.world >= 1 and manifest.nodes >= 1):
        raise ValueError(f"a checkpoint of {manifest.world} ranks on {manifest.nodes} nodes")
    names = [part.name for part in manifest.parts]
    if len(set(names)) != len(names):
        raise ValueError("two parts have the same name")
    digits = get_checksum_width(manifest.checksum)
    for part in manifest.parts:
        inside = part.name.removeprefix(manifest.key.data_prefix)
        if inside == part.name or not inside or inside.startswith(".") or "/" in inside:
            raise ValueError(f"{part.name} is not a file of {manifest.key.data_prefix}")
        if part.size < HEADER or not is_sum(part.header, digits):
            raise ValueError(f"{part.name} has {part.size} bytes and a header with sum {part.header}")
    for name, tensor in manifest.tensors.items():
        _check_tensor(name, tensor, manifest.parts, digits)


def _check_tensor(name: str, tensor: StoredTensor, parts: tuple[CheckpointPart, ...], digits: int) -> None:
    size = get_itemsize(tensor.dtype)
    for shard in tensor.shards:
        if not len(shard.offsets) == len(shard.sizes) == len(tensor.shape):
            raise ValueError(f"{name} has {len(tensor.shape)} dimensions, a shard has others")
        for offset, length, extent in zip(shard.offsets, shard.sizes, tensor.shape, strict=True):
            if offset < 0 or length < 0 or offset + length > extent:
                raise ValueError(f"a shard of {name} reaches beyond its shape {tensor.shape}")
        if sum(chunk.length for chunk in shard.chunks) != prod(shard.sizes) * size:
            raise ValueError(f"the chunks of a shard of {name} have another size than the shard")
        for chunk in shard.chunks:
            if not (0 <= chunk.part < len(parts) and 0 < chunk.length <= CHUNK and is_sum(chunk.sum, digits)):
                raise ValueError(f"a chunk of {name} is not possible: {chunk}")
            if not HEADER <= chunk.offset <= parts[chunk.part].size - chunk.length:
                raise ValueError(f"a chunk of {name} is outside of its part: {chunk}")
