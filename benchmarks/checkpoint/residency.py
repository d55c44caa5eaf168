"""Tells which part of a file is in the page cache, and drives it out."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path


def evict(path: Path) -> None:
    """Drives a file that is on disk out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident(path: Path) -> float:
    """Return the share of a file's pages that is in the page cache (mincore)."""
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
