"""A child that is forked from a rank has none of the memory of its slots, and loses none of its own for that."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

from everstep.checkpoint.host.own_mapping import map_for_this_process

SIZE = 64 * mmap.PAGESIZE


def own_memory_at(address: int) -> int:
    """Map private memory where there is none yet, and return its address."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return int(libc.mmap(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0))


def test_a_forked_child_that_drops_what_its_parent_has_mapped_keeps_its_own_memory() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        pages: mmap.mmap | None = map_for_this_process(file.fileno(), SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))  # type: ignore[arg-type]
    child = os.fork()
    if child == 0:
        if own_memory_at(address) != address:
            os._exit(2)
        pages = None  # as the end of a script that leaves its session does
        ctypes.memset(address, 1, SIZE)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_does_not_hold_the_file_that_its_parent_has_mapped() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        pages = map_for_this_process(file.fileno(), SIZE)
        mapped = os.fstat(file.fileno())
    pages[:4] = b"data"
    child = os.fork()
    if child == 0:  # a worker of a loader: the memory of a slot that is removed would not be free while it lives
        held = [path for path in Path("/proc/self/fd").iterdir() if is_open_on(int(path.name), mapped)]
        os._exit(len(held))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pages[:4] == b"data"


def is_open_on(number: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(number), file)
    except OSError:
        return False
