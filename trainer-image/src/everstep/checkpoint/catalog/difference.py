"""Find what differs between two checkpoints, whatever their sharding: names, shapes, types, elements, plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from everstep.checkpoint.catalog.candidates import read_chunk
from everstep.checkpoint.format.descriptions import is_description
from everstep.checkpoint.format.lines import as_text, shorten_value
from everstep.checkpoint.format.manifest import Manifest, Shard, StoredTensor, get_itemsize
from everstep.checkpoint.format.start_mark import MARK
from everstep.checkpoint.store.base import Store

_NUMPY = {
    "bool": "bool", "uint8": "u1", "int8": "i1", "uint16": "u2", "int16": "i2", "uint32": "u4", "int32": "i4",
    "uint64": "u8", "int64": "i8", "float16": "f2", "float32": "f4", "float64": "f8", "complex64": "c8",
    "complex128": "c16",
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints: `what` differs about the tensor or value `name`."""

    name: str
    what: str


def iterate_differences(
    ours: tuple[Store, Manifest],
    theirs: tuple[Store, Manifest],
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Iterator[Difference]:
    """Yield the differences in the order of names. Bytes are read, and verified, only where checksums do not tell.

    Takes a few times the memory of the largest tensor that is read. Raises Damaged, Missing.
    """
    (store, manifest), (other_store, other) = ours, theirs
    for name in sorted(manifest.tensors.keys() | other.tensors.keys()):
        here, there = manifest.tensors.get(name), other.tensors.get(name)
        if here is None or there is None:
            yield Difference(name, f"only in the {'second' if here is None else 'first'}")
        elif (here.dtype, here.shape) != (there.dtype, there.shape):
            yield Difference(name, f"{_describe_kind(here)} and {_describe_kind(there)}")
        elif manifest.checksum != other.checksum or _list_piece_sums(here) != _list_piece_sums(there):
            what = _describe_elements(
                here, _read_tensor(store, manifest, here, on_bytes), _read_tensor(other_store, other, there, on_bytes)
            )
            if what:
                yield Difference(name, what)
    for name in sorted(
        each for each in manifest.values.keys() | other.values.keys() if each != MARK and not is_description(each)
    ):
        if name not in manifest.values or name not in other.values:
            yield Difference(name, f"only in the {'second' if name not in manifest.values else 'first'}")
        elif as_text(manifest.values[name]) != as_text(other.values[name]):
            yield Difference(name, f"{shorten_value(manifest.values[name])} and {shorten_value(other.values[name])}")


def _describe_kind(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _list_piece_sums(tensor: StoredTensor) -> list[tuple[Any, ...]]:
    """Equal for tensors that lie in equal pieces with equal bytes."""
    return sorted(
        (shard.offsets, shard.sizes, tuple((chunk.length, chunk.sum) for chunk in shard.chunks))
        for shard in tensor.shards
    )


def _read_tensor(
    store: Store, manifest: Manifest, tensor: StoredTensor, on_bytes: Callable[[int], None]
) -> npt.NDArray[np.uint8]:
    """Return the bytes of a whole tensor, row-major: its shape, and the bytes of an element."""
    width = get_itemsize(tensor.dtype)
    found = np.zeros((*tensor.shape, width), np.uint8)
    for shard in tensor.shards:
        data = bytearray(prod(shard.sizes) * width)
        at = 0
        for chunk in shard.chunks:
            read_chunk(store, manifest, chunk, memoryview(data)[at : at + chunk.length])
            at += chunk.length
            on_bytes(chunk.length)
        found[_get_box(shard)] = np.frombuffer(data, np.uint8).reshape(*shard.sizes, width)
    return found


def _get_box(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.sizes, strict=True))


def _describe_elements(tensor: StoredTensor, ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8]) -> str:
    different = int(np.count_nonzero((ours != theirs).any(axis=-1)))
    if not different:
        return ""
    text = f"{different} of {prod(tensor.shape)} elements"
    first, second = _to_numbers(tensor.dtype, ours), _to_numbers(tensor.dtype, theirs)
    if first is None or second is None:
        return text
    with np.errstate(all="ignore"):
        apart = np.abs(first - second)
    return f"{text}, up to {float(np.nanmax(apart, initial=0.0)):.3g} apart"


def _to_numbers(dtype: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[Any] | None:
    """Return the bytes as numbers that can be subtracted; None for types that numpy does not know."""
    flat = np.ascontiguousarray(data).reshape(-1)
    if dtype == "bfloat16":
        return (flat.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    if dtype not in _NUMPY:
        return None
    found = flat.view(np.dtype(_NUMPY[dtype]).newbyteorder("<"))
    return found if dtype.startswith("complex") else found.astype(np.float64)
