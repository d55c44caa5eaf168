"""Lets a disk begin with what was written, while the rest is still being copied into the page cache; and of a large
file lets go what is on the disk, so that it drives out nothing else.

Nothing is durable before fsync, and where the calls do not exist nothing is lost but time.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from typing import Any

from everstep.checkpoint.host import available_memory

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # SYNC_FILE_RANGE_…
_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE, errno.EPERM}

_LEAST = 1 << 20  # bytes; less is not worth a call
_WINDOW = 64 << 20  # bytes of a large file that are on their way to the disk
_RANKS = 8  # that write at the same time, each a part of its own


def _find_sync_function() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_call = _find_sync_function()


class WriteBehind:
    """One file, of `size` bytes in all, that is written in order.

    Pages of a file cost others theirs, and a machine that is short of them writes several times slower than its disk.
    A checkpoint that is to be restored soon is in a slot anyway.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._begun: deque[tuple[int, int]] = deque()
        self._large = _call is not None and size > _WINDOW and size > available_memory.get_available_memory() // _RANKS

    def wrote(self, offset: int, length: int) -> None:
        """These bytes are in the page cache. OSError when earlier ones cannot be written: fsync may say so no more."""
        if _call is None or length < _LEAST:
            return
        _call(self._descriptor, offset, length, _WRITE)  # what goes wrong here fsync will say
        if not self._large:
            return
        self._begun.append((offset, length))
        while sum(length for _, length in self._begun) > _WINDOW:
            self._let_go(*self._begun.popleft())

    def synced(self) -> None:
        """All of the file is on the disk."""
        if self._large:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _let_go(self, offset: int, length: int) -> None:
        # Unlike the first call this one takes an error of the disk from the file, and fsync would not know it.
        if _call(self._descriptor, offset, length, _WAIT_BEFORE | _WRITE | _WAIT_AFTER):
            number = ctypes.get_errno()
            if number not in _NOT_HERE:
                raise OSError(number, os.strerror(number))
            self._large = False
            return
        os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)
