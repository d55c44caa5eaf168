"""Chunks are read in pieces, summed, and their bytes put where they belong."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.chunk_reads import PIECE, ChunkRead, ChunkReader, Destination
from everstep.checkpoint.errors import Damaged
from everstep.checkpoint.format.checksum import ALGORITHMS, begin_checksum, compute_checksum
from everstep.checkpoint.format.manifest import ALIGN, CHUNK, HEADER, Chunk, align_offset
from everstep.checkpoint.store.mounts import is_on_this_machine
from everstep.checkpoint.store.reader import open_file

NAME = "a part"


def made(path: Path, lengths: list[int], algorithm: str) -> tuple[bytes, list[Chunk]]:
    """A part with chunks of these lengths, and its bytes."""
    random_bytes = random.Random(1).randbytes
    data, chunks = bytearray(random_bytes(HEADER)), []
    for length in lengths:
        data += bytes(align_offset(len(data)) - len(data))
        chunk = random_bytes(length)
        chunks.append(Chunk(0, len(data), length, compute_checksum(algorithm, chunk)))
        data += chunk
    path.write_bytes(data)
    return bytes(data), chunks


def reader(path: Path, algorithm: str = "xxh3_64") -> ChunkReader:
    return ChunkReader(lambda part: open_file(path, NAME), lambda part: NAME, algorithm, lambda: None)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_of_chunks_large_and_small_arrive_whole_in_part_and_at_several_places(
    algorithm: str, tmp_path: Path
) -> None:
    lengths = [1, 5000, PIECE, PIECE + 1, 3, 64, CHUNK, 2 * PIECE - 7, 100]
    data, chunks = made(tmp_path / "part", lengths, algorithm)
    target = (ctypes.c_char * (3 * len(data)))()
    start = ctypes.addressof(target)
    reads = []
    for chunk in chunks:
        low, high = chunk.length // 3, chunk.length - chunk.length // 5
        reads.append(ChunkRead(chunk, (Destination(start + chunk.offset, 0, chunk.length),)))
        # The same chunk for others, of whom one takes a piece that begins and ends anywhere.
        reads.append(ChunkRead(chunk, (Destination(start + len(data) + chunk.offset + low, low, high),)))
        if chunk.length % 2:
            reads.append(ChunkRead(chunk))
    alone = [
        ChunkRead(chunk, (Destination(start + 2 * len(data) + chunk.offset, 0, chunk.length),)) for chunk in chunks
    ]
    reader(tmp_path / "part", algorithm).read(random.Random(2).sample(reads, len(reads)))
    reader(tmp_path / "part", algorithm).read(alone)
    got = bytes(target)
    for chunk in chunks:
        end, low, high = chunk.offset + chunk.length, chunk.length // 3, chunk.length - chunk.length // 5
        for base in (0, 2 * len(data)):
            assert got[base + chunk.offset : base + end] == data[chunk.offset : end]
        at = len(data) + chunk.offset
        assert got[at + low : at + high] == data[chunk.offset + low : chunk.offset + high]
        assert not any(got[at : at + low])
        assert not any(got[at + high : at + chunk.length])


@pytest.mark.parametrize("number", range(4))
def test_a_flipped_bit_anywhere_is_found(number: int, tmp_path: Path) -> None:
    data, chunks = made(tmp_path / "part", [100, 200, CHUNK, 2 * PIECE], "xxh3_64")
    chunk = chunks[number]
    for at in (chunk.offset, chunk.offset + chunk.length - 1, chunk.offset + chunk.length // 2):
        bad = bytearray(data)
        bad[at] ^= 1
        (tmp_path / "part").write_bytes(bad)
        with pytest.raises(Damaged, match=rf"{NAME}: bytes {chunk.offset} to {chunk.offset + chunk.length} are not"):
            reader(tmp_path / "part").read([ChunkRead(each) for each in chunks])


def test_a_file_that_ends_early_is_damaged(tmp_path: Path) -> None:
    data, chunks = made(tmp_path / "part", [100, CHUNK], "xxh3_64")
    (tmp_path / "part").write_bytes(data[:-ALIGN])
    with pytest.raises(Damaged, match=r"64 bytes too early"):
        reader(tmp_path / "part").read([ChunkRead(each) for each in chunks])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_checksum_of_pieces_is_that_of_the_whole(algorithm: str) -> None:
    data = random.Random(3).randbytes(300_001)
    running = begin_checksum(algorithm)
    for at in range(0, len(data), 70_000):
        running.update(memoryview(data)[at : at + 70_000])
    assert running.hexdigest() == compute_checksum(algorithm, data)


def test_a_folder_of_a_network_file_system_is_not_on_this_machine(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    rows = {"/": "ext4", "/mnt/with\\040space": "nfs4", "/mnt/with\\040space/local": "xfs", "/fuse": "fuse.s3fs"}
    table.write_text(
        "".join(f"36 35 98:0 / {point} rw,noatime shared:1 - {kind} x rw\n" for point, kind in rows.items())
    )
    found = {
        folder: is_on_this_machine(Path(folder), table)
        for folder in ("/data", "/mnt/with space/run", "/mnt/with space/local/run", "/fuse", "/fused")
    }
    assert found == {
        "/data": True, "/mnt/with space/run": False, "/mnt/with space/local/run": True, "/fuse": False, "/fused": True,
    }  # fmt: skip
    assert not is_on_this_machine(Path("/data"), tmp_path / "no table"), "where nothing is known"
