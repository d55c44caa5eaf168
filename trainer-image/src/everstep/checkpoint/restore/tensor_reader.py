"""Tensors of a checkpoint from its store, each read and verified when it is wanted; no rank, no memory of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from math import prod
from threading import local
from typing import Any, Self

import torch

from everstep.checkpoint.catalog.candidates import read_chunk
from everstep.checkpoint.format.manifest import Chunk, Manifest, Shard
from everstep.checkpoint.host.thread_pool import ThreadPool
from everstep.checkpoint.restore.placing import has_plain_memory
from everstep.checkpoint.state.kinds import dtype_name
from everstep.checkpoint.state.memory import view_bytes
from everstep.checkpoint.store.base import Store


class TensorReader(AbstractContextManager["TensorReader"]):
    """Reads of one checkpoint. It takes the memory of what it returns, and of `threads` chunks or one shard beside."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        threads: int = 4,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._on_bytes = on_bytes
        self._pool = ThreadPool(threads, thread_name_prefix="load")
        self._own = local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor in main memory. Damaged, Missing, StoreError."""
        tensor = self._manifest.tensors[name]
        found = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="cpu")
        self.read_into(name, found)
        return found

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill a tensor of the whole saved shape, on any device and of any type. Damaged, Missing, StoreError."""
        tensor = self._manifest.tensors[name]
        for number, shard in enumerate(tensor.shards):
            if prod(shard.sizes):
                box = target
                for dim, (start, length) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
                    box = box.narrow(dim, start, length)
                self.read_box(name, number, (0,) * len(shard.sizes), shard.sizes, box)

    def read_box(
        self, name: str, number: int, offsets: Sequence[int], sizes: Sequence[int], target: torch.Tensor
    ) -> None:
        """Fill `target` with the box [offsets, offsets + sizes) of a tensor's shard. Damaged, Missing, StoreError."""
        tensor = self._manifest.tensors[name]
        shard = tensor.shards[number]
        is_direct = has_plain_memory(target) and dtype_name(target.dtype) == tensor.dtype
        if tuple(sizes) == shard.sizes and is_direct:
            self._read_chunks(shard.chunks, _view_bytes(target))
            return
        chunks, begin = self._within(shard, tensor.dtype, offsets, sizes)
        dtype = getattr(torch, tensor.dtype)
        raw = torch.zeros(prod(shard.sizes), dtype=dtype, device="cpu")  # pages that are not read are never made
        view = _view_bytes(raw)
        self._read_chunks(chunks, view[begin : begin + sum(chunk.length for chunk in chunks)])
        box = raw.view(shard.sizes)
        for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
            box = box.narrow(dim, start, length)
        target.copy_(box)

    def verify(self, chunks: Iterable[Chunk]) -> None:
        """Read chunks and check their sums; nothing of them stays. Damaged, Missing, StoreError."""
        every = list(chunks)
        longest = max((chunk.length for chunk in every), default=0)

        def check(chunk: Chunk) -> None:
            if len(getattr(self._own, "buffer", b"")) < chunk.length:
                self._own.buffer = memoryview(bytearray(longest))
            read_chunk(self._store, self._manifest, chunk, self._own.buffer[: chunk.length])
            self._on_bytes(chunk.length)

        for _ in self._pool.map(check, every):
            pass

    def chunks_of(self, name: str, number: int, offsets: Sequence[int], sizes: Sequence[int]) -> Sequence[Chunk]:
        """Return the chunks that read_box() reads."""
        tensor = self._manifest.tensors[name]
        return self._within(tensor.shards[number], tensor.dtype, offsets, sizes)[0]

    def _within(
        self, shard: Shard, dtype: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> tuple[Sequence[Chunk], int]:
        """Return the chunks that hold a box, and at which byte of the shard the first of them begins."""
        size = getattr(torch, dtype).itemsize
        last = [offset + length - 1 for offset, length in zip(offsets, sizes, strict=True)]
        start, stop = (
            _compute_linear_index(offsets, shard.sizes) * size,
            (_compute_linear_index(last, shard.sizes) + 1) * size,
        )
        found: list[Chunk] = []
        begin = at = 0
        for chunk in shard.chunks:
            if at < stop and at + chunk.length > start:
                begin = begin if found else at
                found.append(chunk)
            at += chunk.length
        return found, begin

    def _read_chunks(self, chunks: Sequence[Chunk], into: memoryview) -> None:
        starts, at = [], 0
        for chunk in chunks:
            starts.append(at)
            at += chunk.length

        def read(each: tuple[Chunk, int]) -> None:
            chunk, start = each
            read_chunk(self._store, self._manifest, chunk, into[start : start + chunk.length])
            self._on_bytes(chunk.length)

        if len(chunks) == 1:
            read((chunks[0], 0))
            return
        for _ in self._pool.map(read, zip(chunks, starts, strict=True)):
            pass


def _view_bytes(tensor: torch.Tensor) -> memoryview:
    flat: Any = view_bytes(tensor).numpy()
    return memoryview(flat)


def _compute_linear_index(position: Iterable[int], sizes: Iterable[int]) -> int:
    """Return the row-major number of an element."""
    number = 0
    for at, extent in zip(position, sizes, strict=True):
        number = number * extent + at
    return number
