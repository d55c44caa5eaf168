"""Memory of a file that this process maps and that no child which is forked from it gets."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_MAPPED: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def map_for_this_process(descriptor: int, size: int) -> mmap.mmap:
    """Map the first bytes of a file: children, such as workers of a loader, would keep its memory while they live.

    Args:
        descriptor: Of the file, open for reading and writing.
        size: In bytes.
    """
    pages = mmap.mmap(descriptor, size)
    pages.madvise(mmap.MADV_DONTFORK)
    _MAPPED.add(pages)
    return pages


def _never_unmap() -> None:
    """Keep the objects in a child for good: it may have memory of its own there by then, which would be unmapped."""
    for pages in _MAPPED:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pages))


os.register_at_fork(after_in_child=_never_unmap)
