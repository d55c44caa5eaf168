"""Place the bytes of a saved box: right into a tensor of ours, or through memory from which torch copies them on."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod

import torch

from everstep.checkpoint.catalog.chunk_reads import ChunkRead, Destination
from everstep.checkpoint.format.manifest import Chunk, Shard, get_itemsize

_HUGE = 4 << 20  # bytes of memory from which pages of 2 MiB are asked for


class ShardBox:
    """A box of a saved shard of `dtype`, by its offsets and lengths within the shard."""

    def __init__(
        self,
        shard: Shard,
        dtype: str,
        offsets: Sequence[int],
        lengths: Sequence[int],
        *,
        within: Sequence[tuple[Chunk, int]] | None = None,
    ) -> None:
        """`within`: the chunks, with their places in the shard, among which those of the box are; None: any of it."""
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.lengths = tuple(lengths)
        self._shard = shard
        self._within = within
        self._size = get_itemsize(dtype)
        self._first = _compute_linear_index(offsets, shard.sizes)
        last = _compute_linear_index(
            [offset + length - 1 for offset, length in zip(offsets, lengths, strict=True)], shard.sizes
        )
        # Bytes of the shard; between them are others than the box's unless it is in one piece.
        self.start, self.stop = self._first * self._size, (last + 1) * self._size

    @property
    def in_one_piece(self) -> bool:
        """Tell whether nothing but the box lies between its first byte and its last."""
        return self.stop - self.start == prod(self.lengths) * self._size

    def chunks(self) -> list[tuple[Chunk, int]]:
        """Return the chunks that hold bytes of the box, each with the place of its first byte in the shard."""
        within = _place_chunks(self._shard) if self._within is None else self._within
        return [(chunk, at) for chunk, at in within if at < self.stop and at + chunk.length > self.start]

    def reads_into(self, target: torch.Tensor) -> list[ChunkRead] | None:
        """Return reads that bring the box right into `target`; None if its memory is not the box's bytes in order."""
        address = host_address(target)
        if not address or target.dtype is not self.dtype or not self.in_one_piece:
            return None
        return [
            ChunkRead(
                chunk,
                (
                    Destination(
                        address + max(at, self.start) - self.start,
                        max(self.start - at, 0),
                        min(self.stop - at, chunk.length),
                    ),
                ),
            )
            for chunk, at in self.chunks()
        ]

    def pieces(self, size: int) -> Iterator[tuple[ShardBox, int]]:
        """Yield boxes that follow each other, for a box that is in one piece: each has at most `size` bytes, or one
        chunk, and comes with the number of its first element in this box."""
        first = stop = self.start
        within: list[tuple[Chunk, int]] = []  # chunks that hold bytes from `first` on
        for chunk, at in self.chunks():
            end = min(at + chunk.length, self.stop)
            if end - first > size and stop > first:
                yield self._piece(first, stop, within)
                first, within = stop, within[-1:]  # which may end within an element
            within.append((chunk, at))
            stop = end // self._size * self._size
        yield self._piece(first, self.stop, within)

    def _piece(self, start: int, stop: int, within: Sequence[tuple[Chunk, int]]) -> tuple[ShardBox, int]:
        flat = Shard((0,), (prod(self._shard.sizes),), self._shard.chunks)
        offset, length = start // self._size, (stop - start) // self._size
        dtype = str(self.dtype).removeprefix("torch.")
        return ShardBox(flat, dtype, (offset,), (length,), within=within), offset - self._first

    @property
    def room(self) -> int:
        """Return the bytes of memory that reads_through() takes."""
        return sum(chunk.length for chunk, _ in self.chunks()) + 2 * self._size

    def reads_through(self, memory: Memory, offset: int) -> tuple[list[ChunkRead], torch.Tensor]:
        """Return reads that bring the box's chunks into `memory` from `offset` on, and the box as a tensor in it."""
        chunks = self.chunks()
        begin = chunks[0][1]
        lead = begin % self._size  # a chunk may begin within an element
        to = memory.address + offset + lead
        reads = [ChunkRead(chunk, (Destination(to + at - begin, 0, chunk.length),)) for chunk, at in chunks]
        elements = (self.room - self._size) // self._size
        flat = torch.frombuffer(memory.view, dtype=self.dtype, count=elements, offset=offset)
        strides = [prod(self._shard.sizes[dim + 1 :]) for dim in range(len(self._shard.sizes))]
        return reads, flat.as_strided(self.lengths, strides, (self.start - begin + lead) // self._size)


def read_whole(shard: Shard, dtype: str, target: torch.Tensor) -> list[ChunkRead] | None:
    """Return the reads that bring a whole shard into `target`; None where its memory is not the shard's in order."""
    address = host_address(target)
    if not address or target.dtype is not getattr(torch, dtype):
        return None
    reads = []
    for chunk in shard.chunks:
        reads.append(ChunkRead(chunk, (Destination(address, 0, chunk.length),)))
        address += chunk.length
    return reads


class Memory:
    """New memory in large pages, where there are some; it lives as long as any tensor in it."""

    def __init__(self, size: int, *, pinned: bool = False) -> None:
        """`pinned`: a GPU copies from it at the speed of the bus."""
        self._pages: object
        if pinned:
            held = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._pages, self.address = held, held.data_ptr()
            self.view = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")
            return
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE:
            with suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        self._pages, self.view = pages, memoryview(pages)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(pages))


def host_address(tensor: torch.Tensor) -> int:
    """Return the address in main memory where its bytes lie in one piece; 0 where they do not, and for a wrapper."""
    return tensor.data_ptr() if has_plain_memory(tensor) else 0


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Tell whether the bytes in a tensor's memory are its elements, one after the other, in main memory.

    Those of a conjugated or negated view are not: torch changes them on the way out, and back on the way in.
    """
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _place_chunks(shard: Shard) -> Iterator[tuple[Chunk, int]]:
    at = 0
    for chunk in shard.chunks:
        yield chunk, at
        at += chunk.length


def _compute_linear_index(position: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the row-major number of an element."""
    number = 0
    for at, extent in zip(position, sizes, strict=True):
        number = number * extent + at
    return number
