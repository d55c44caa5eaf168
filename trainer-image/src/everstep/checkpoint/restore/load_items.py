"""Map saved bytes to where they go: a box of a saved shard, and the tensor of ours that it fills."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from everstep.checkpoint.catalog.chunk_reads import ChunkRead
from everstep.checkpoint.errors import Damaged
from everstep.checkpoint.format.manifest import StoredTensor
from everstep.checkpoint.restore.placing import ShardBox, read_whole


@dataclass(frozen=True)
class ShardPlace:
    """The place where a saved shard lies, as one piece of a part."""

    part: int
    offset: int
    length: int
    dtype: str
    sizes: tuple[int, ...]

    def view(self, part: memoryview) -> torch.Tensor:
        """Return the shard as a tensor on the bytes of its part."""
        dtype = getattr(torch, self.dtype)
        return torch.frombuffer(part, dtype=dtype, count=self.length // dtype.itemsize, offset=self.offset).view(
            self.sizes
        )


@dataclass(frozen=True)
class LoadItem:
    """A box of a saved shard, and where it belongs: a tensor of ours or a part of one, of the box's sizes."""

    name: str
    shard: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor
    is_new: bool = False  # the target is nobody's yet: what is read into it too early harms nobody

    def box(self, tensor: StoredTensor) -> ShardBox:
        """Return the box in the shard as it was saved."""
        return ShardBox(tensor.shards[self.shard], tensor.dtype, self.offsets, self.lengths)

    def reads_into(self, tensor: StoredTensor, target: torch.Tensor) -> list[ChunkRead] | None:
        """Return the reads that bring the box right into `target`; None where that cannot be."""
        shard = tensor.shards[self.shard]
        if self.lengths == shard.sizes:  # most of them
            return read_whole(shard, tensor.dtype, target)
        return self.box(tensor).reads_into(target)


def find_shard(name: str, tensor: StoredTensor, index: int) -> ShardPlace:
    """Return where a shard of the tensor of this name lies.

    Args:
        name: The tensor's name, for the error.
        tensor: The tensor as the manifest describes it.
        index: The shard's place in `tensor.shards`.

    Raises:
        Damaged: It is not in one piece.
    """
    shard = tensor.shards[index]
    first = shard.chunks[0]
    end = first.offset
    for chunk in shard.chunks:
        if (chunk.part, chunk.offset) != (first.part, end):
            raise Damaged(name, "a shard of it is not in one piece")
        end += chunk.length
    return ShardPlace(first.part, first.offset, end - first.offset, tensor.dtype, shard.sizes)
