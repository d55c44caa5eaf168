"""Checksums of tensors where they are, in pieces: whether two ranks hold the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import xxhash

from everstep.checkpoint.state.memory import view_bytes

PIECE = 32 << 20  # bytes; of a tensor on a device this many are in main memory at a time


def checksum_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return 64 bits for each tensor, of its elements in row-major order.

    NaN is equal to NaN of the same bits. A tensor on another device than the processor comes through one buffer in main
    memory; the call returns when everything is read.
    """
    buffer: torch.Tensor | None = None
    found = []
    for tensor in tensors:
        state = xxhash.xxh3_64()
        for piece in _iterate_pieces(tensor.detach().resolve_conj().resolve_neg()):
            data = view_bytes(piece)
            if not data.is_cpu:
                if buffer is None:
                    buffer = torch.empty(PIECE, dtype=torch.uint8, device="cpu", pin_memory=data.is_cuda)
                target = (
                    buffer[: len(data)]
                    if len(data) <= PIECE
                    else torch.empty(len(data), dtype=torch.uint8, device="cpu")
                )
                data = target.copy_(data)
            state.update(memoryview(cast("Any", data.numpy())))
        found.append(state.intdigest())
    return found


def _iterate_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield contiguous pieces of at most PIECE bytes, whose elements one after the other are those of the tensor."""
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, PIECE // tensor.element_size()))
    elif tensor.nbytes <= PIECE:
        yield tensor.contiguous()
    else:
        for row in tensor:
            yield from _iterate_pieces(row)
