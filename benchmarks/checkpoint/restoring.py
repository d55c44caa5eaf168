"""Rows `restore-cold-*`, `restore-warm-*` and `restore-node-*`: from the store without and with the page cache, and
from this node's memory, each until the tensors of a script hold the state."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.checkpoint import floors, state
from benchmarks.checkpoint.rows import REPEATS, Interval
from benchmarks.measure import alternate
from everstep.checkpoint.board import Alone
from everstep.checkpoint.restore import Restorer
from everstep.checkpoint.session import Checkpointer
from everstep.checkpoint.topology import Topology
from everstep.checkpoint.vote import Vote

COLD, WARM, NODE = 1.2, 1.6, 2.0  # times a plain read, a plain read, a copy

PIECE = 8 << 20


def rows(size: int, name: str, folder: Path) -> Iterator[Interval]:
    """One checkpoint of `size` bytes, restored into the objects that it was saved from."""
    objects = state.made(size)
    memory, nothing = folder / "memory", folder / "nothing"
    with Checkpointer(folder / "ours", every="365d", memory=_shared(memory)) as ckpt:
        ckpt.track(**objects)
        ckpt.save(1)
        ckpt.wait()
        [part] = (folder / "ours" / "data").glob("*/*/*.part")
        length = part.stat().st_size

        def restore(place: Path, tier: str) -> float:
            restorer = Restorer(objects, ckpt.store, Topology(0, 1, 0, 1, (0,)), Vote(Alone(), 0, 1), place)
            began = time.perf_counter()
            restored = restorer.restore()
            took = time.perf_counter() - began
            assert restored.tier == tier, restored
            return took

        with floors.buffer(length) as buffer:

            def cold(arm: Callable[[], float]) -> Callable[[], float]:
                def measured() -> float:
                    evict(part)
                    assert resident(part) < 0.01, f"{part} cannot be driven out of the page cache"
                    return arm()

                return measured

            def read() -> float:
                return floors.read(part, buffer)

            def from_store() -> float:
                return restore(nothing, "store")

            yield _row("restore-cold", name, COLD, cold(from_store), cold(read))
            yield _row("restore-warm", name, WARM, from_store, read)
            sources = state.tensors(objects)
            yield _row(
                "restore-node",
                name,
                NODE,
                lambda: restore(_shared(memory), "memory"),
                lambda: floors.copy(buffer, sources),
            )
    shutil.rmtree(folder / "ours")


def _row(kind: str, name: str, target: float, ours: Callable[[], float], floor: Callable[[], float]) -> Interval:
    row = Interval(f"{kind}-{name}", "s", target)
    alternate(row, ours, floor, REPEATS)
    return row


def _shared(folder: Path) -> Path:
    """The same name in shared memory."""
    return Path("/dev/shm") / f"everstep-bench-{folder.parent.name}-{folder.name}"


def evict(path: Path) -> None:
    """Drives a file that is on disk out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident(path: Path) -> float:
    """Which share of a file's pages is in the page cache (mincore)."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    try:
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(each & 1 for each in found) / pages
