"""The layout of what a rank holds of a state, small enough to be sent: names once, and each box as two numbers.

A box of a tensor is named by the row-major numbers of its first and its last element, so that arrays of integers say
where all boxes of a rank are, in any number of dimensions.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import xxhash

from everstep.checkpoint.format.manifest import get_itemsize

_FAST = 1  # zlib: most numbers are zeros, and a better compression takes longer than the network


class Ownership(IntEnum):
    """The rule for who writes a tensor of a rank."""

    SHARED = 0  # one of the ranks that hold the same box
    OWN = 1  # this rank, and nobody else has it
    ELSEWHERE = 2  # another rank: what this one holds does not count


@dataclass(frozen=True)
class LayoutNames:
    """The tensors of a rank without their boxes: equal on ranks that hold other shards of the same state.

    `names` of a rank's own tensors are relative to what is the rank's own.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    claims: tuple[Ownership, ...]

    @cached_property
    def claim_codes(self) -> np.ndarray[Any, np.dtype[np.int8]]:
        """Return the claims as numbers."""
        return np.array(self.claims, np.int8)

    @cached_property
    def extents(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the shapes as rows, the last dimension first, filled up with ones; no extent is below one."""
        return extents_of(self.shapes)

    @cached_property
    def widths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the bytes of one element of each tensor."""
        return np.array([get_itemsize(dtype) for dtype in self.dtypes], np.int64)

    @cached_property
    def encoded(self) -> bytes:
        """Return the same as bytes, see decode()."""
        kinds: dict[tuple[str, tuple[int, ...], int], int] = {}
        each = zip(self.dtypes, self.shapes, self.claims, strict=True)
        numbers = [kinds.setdefault((dtype, shape, int(claim)), len(kinds)) for dtype, shape, claim in each]
        text = json.dumps([self.names, list(kinds), numbers], separators=(",", ":"))
        return zlib.compress(text.encode(), _FAST)

    def list_shared(self) -> list[str]:
        """Return the names of the tensors that other ranks may hold too."""
        return [name for name, claim in zip(self.names, self.claims, strict=True) if claim is Ownership.SHARED]

    @classmethod
    def decode(cls, data: bytes) -> LayoutNames:
        names, kinds, numbers = json.loads(zlib.decompress(data))
        made = [(dtype, tuple(shape), Ownership(claim)) for dtype, shape, claim in kinds]
        return cls(
            tuple(names),
            tuple(made[number][0] for number in numbers),
            tuple(made[number][1] for number in numbers),
            tuple(made[number][2] for number in numbers),
        )


@dataclass(frozen=True)
class RankLayout:
    """The elements that one rank holds: for tensor i those elements from `spans[i][0]` to `spans[i][1]`, both included.

    Spans are int64, of shape (tensors, 2). Nothing is held where the last comes before the first.
    """

    tensors: LayoutNames
    spans: np.ndarray[Any, np.dtype[np.int64]]

    @cached_property
    def blobs(self) -> tuple[bytes, bytes]:
        """Both halves as bytes: ranks that have the same bytes hold the same."""
        return self.tensors.encoded, zlib.compress(self.spans.tobytes(), _FAST)


def extents_of(shapes: Sequence[tuple[int, ...]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """See LayoutNames.extents."""
    found = np.ones((len(shapes), max(map(len, shapes), default=0)), np.int64)
    for row, shape in zip(found, shapes, strict=True):
        row[: len(shape)] = [max(1, extent) for extent in reversed(shape)]
    return found


def decode_spans(data: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the spans of a layout from the second of its blobs."""
    return np.frombuffer(zlib.decompress(data), np.int64).reshape(-1, 2)


def digest_blob(data: bytes) -> bytes:
    """16 bytes that stand for these."""
    return xxhash.xxh3_128_digest(data)


def span_of_box(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of a box's first and last element; (0, -1) for a box without elements."""
    if not prod(sizes):
        return 0, -1
    first = last = 0
    for extent, offset, size in zip(shape, offsets, sizes, strict=True):
        first = first * extent + offset
        last = last * extent + offset + size - 1
    return first, last


def box_of_span(shape: Sequence[int], first: int, last: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) in each dimension of the box with this first and last element."""
    box = []
    for extent in reversed(shape):
        first, start = divmod(first, extent)
        last, end = divmod(last, extent)
        box.append((start, end + 1))
    return tuple(reversed(box))
