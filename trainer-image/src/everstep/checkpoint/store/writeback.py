"""Lets a disk begin with what was written, while the rest is still being copied into the page cache.

Only a beginning: nothing is durable before fsync, and where the call does not exist nothing is lost but time.
"""

from __future__ import annotations

import ctypes
from typing import Any

_WRITE = 2  # SYNC_FILE_RANGE_WRITE


def _find() -> Any:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_call = _find()


def begin(descriptor: int, offset: int, length: int) -> None:
    """Asks for these bytes of a file to be written soon; returns before they are, and never fails."""
    if _call is not None:
        _call(descriptor, offset, length, _WRITE)
