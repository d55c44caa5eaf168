"""Plain arms: what the same bytes cost when nobody asks for anything but bytes. Times in seconds."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from everstep.checkpoint.save.snapshots import populate_pages
from everstep.checkpoint.state.staging import Host

PIECE = 8 << 20


class Buffer:
    """Shared memory of the same kind as a slot, its pages there."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self.pages = mmap.mmap(file.fileno(), size)
        self.bytes = torch.frombuffer(self.pages, dtype=torch.uint8)
        populate_pages(self.bytes.data_ptr(), size)

    def remove(self) -> None:
        self._path.unlink()


@contextmanager
def buffer(size: int) -> Iterator[Buffer]:
    """Removed at the end."""
    made = Buffer(Path(f"/dev/shm/everstep-bench-{os.getpid()}-{size}"), size)
    try:
        yield made
    finally:
        made.remove()


def copy(into: Buffer, sources: Sequence[torch.Tensor]) -> float:
    """Copy the tensors one after the other, as bytes, by as many threads as torch has."""
    host = Host()
    moves, at = [], 0
    for source in sources:
        moves.append((into.bytes.data_ptr() + at, source.data_ptr(), source.nbytes))
        at += -(-source.nbytes // 64) * 64
    began = time.perf_counter()
    host.move(moves)
    took = time.perf_counter() - began
    host.close()
    return took


def write(path: Path, source: Buffer, size: int) -> float:
    """Write a new file, in order, from the same kind of memory, with one fsync."""
    with memoryview(source.pages) as data:
        began = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for start in range(0, size, PIECE):
                rest = data[start : min(start + PIECE, size)]
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        took = time.perf_counter() - began
    path.unlink()
    return took


def read(path: Path, into: Buffer) -> float:
    """Read a whole file, in order, into memory whose pages are there."""
    with memoryview(into.pages) as data:
        return _read(path, data)


def read_anew(path: Path, size: int) -> float:
    """Read a file into memory that the process does not have yet, in the largest pages that there are."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(pages) as data:
            return _read(path, data)


def _read(path: Path, data: memoryview) -> float:
    began = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        at = 0
        while count := os.preadv(descriptor, [data[at : at + PIECE]], at):
            at += count
    finally:
        os.close(descriptor)
    return time.perf_counter() - began


def receive(address: tuple[str, int], into: Buffer, size: int) -> float:
    """As many bytes as a plain sender sends, into memory whose pages are there."""
    with memoryview(into.pages) as data:
        began = time.perf_counter()
        with socket.create_connection(address) as peer:
            at = 0
            while at < size:
                count = peer.recv_into(data[at : min(at + PIECE, size)], 0, socket.MSG_WAITALL)
                assert count, "the sender has gone"
                at += count
        return time.perf_counter() - began
