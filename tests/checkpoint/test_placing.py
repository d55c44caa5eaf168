"""A saved box goes to its target as one, or in pieces through a little memory."""

from __future__ import annotations

import random
from math import prod
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from everstep.checkpoint.format.manifest import HEADER, Chunk, Shard, get_itemsize
from everstep.checkpoint.restore.placing import Memory, ShardBox
from tests.checkpoint.test_chunk_reads import made, reader

pytestmark = pytest.mark.torch


def cut_anywhere(size: int, draw: random.Random) -> list[int]:
    """Return lengths of chunks that may begin and end within an element."""
    places = sorted(draw.sample(range(1, size), min(size - 1, draw.randint(0, 9))))
    return [stop - start for start, stop in zip([0, *places], [*places, size], strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_a_box_are_the_box_in_order_and_small(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    dtype = draw.choice(["uint8", "bfloat16", "float32", "complex128"])
    size = get_itemsize(dtype)
    sizes = (draw.randint(1, 20), draw.randint(1, 9))
    _, chunks = made(tmp_path / "part", cut_anywhere(prod(sizes) * size, draw), "xxh3_64")
    shard = Shard((0, 0), sizes, tuple(chunks))
    first = draw.randrange(sizes[0])
    box = ShardBox(shard, dtype, (first, 0), (draw.randint(1, sizes[0] - first), sizes[1]))
    limit = draw.randint(1, 300)

    def read(each: ShardBox) -> torch.Tensor:
        memory = Memory(each.room)
        reads, found = each.reads_through(memory, 0)
        reader(tmp_path / "part").read(reads)
        return found.clone()

    meant = read(box).reshape(-1)
    data = b"".join(_bytes_of(tmp_path / "part", chunk) for chunk in chunks)
    assert meant.view(torch.uint8).numpy().tobytes() == data[box.start : box.stop]
    at = 0
    largest = max(chunk.length for chunk in chunks)
    for piece, begin in box.pieces(limit):
        assert begin == at
        found = read(piece)
        at += len(found)
        assert torch.equal(found.view(torch.uint8), meant[begin:at].view(torch.uint8))
        assert found.nbytes <= max(limit, largest + size)
        # Beside its own bytes it has those of the chunks at its ends, and no others.
        assert piece.chunks() == [each for each in box.chunks() if _meet(each, piece)]
    assert at == len(meant)


def _meet(placed: tuple[Chunk, int], box: ShardBox) -> bool:
    chunk, at = placed
    return at < box.stop and at + chunk.length > box.start


def _bytes_of(path: Path, chunk: Chunk) -> bytes:
    assert chunk.offset >= HEADER
    with path.open("rb") as file:
        file.seek(chunk.offset)
        return file.read(chunk.length)
