"""The chunks of a checkpoint by numbers that are the same on every rank."""

from __future__ import annotations

from bisect import bisect_left

from everstep.checkpoint.format.manifest import Chunk, Manifest, Shard


class Chunks:
    """All chunks of a checkpoint in the order of the files, so that every rank can name one by its number."""

    def __init__(self, manifest: Manifest) -> None:
        every = (c for tensor in manifest.tensors.values() for shard in tensor.shards for c in shard.chunks)
        self.all: list[Chunk] = sorted(every, key=_get_place)
        self._places = [_get_place(chunk) for chunk in self.all]

    def of(self, shard: Shard) -> range:
        """Return the numbers of a shard's chunks, of which there are some."""
        first = bisect_left(self._places, _get_place(shard.chunks[0]))
        return range(first, first + len(shard.chunks))

    def within(self, shard: Shard, start: int, stop: int) -> range:
        """Return the numbers of the chunks that hold bytes [start, stop) of a shard that has chunks."""
        first = self.of(shard).start
        low, high, passed = len(shard.chunks), 0, 0
        for i, chunk in enumerate(shard.chunks):
            if passed < stop and passed + chunk.length > start:
                low, high = min(low, i), i + 1
            passed += chunk.length
        return range(first + low, first + high)


def _get_place(chunk: Chunk) -> tuple[int, int]:
    return chunk.part, chunk.offset
