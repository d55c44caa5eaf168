"""Memory of a file that this process maps and that no child which is forked from it gets."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path

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
    _let_go_of_file(descriptor)
    return pages


def _let_go_of_file(descriptor: int) -> None:
    """Have Python's mapping hold another file open than this one: children inherit the descriptor that it has made.

    Nothing needs it but a change of the mapping's size.
    """
    file = os.fstat(descriptor)
    found = [number for number in _list_descriptors() if number != descriptor and _is_open_on(number, file)]
    if len(found) == 1:  # else somebody has the file open besides
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, found[0], inheritable=False)
        os.close(null)


def _list_descriptors() -> list[int]:
    with suppress(OSError):  # no /proc, as in a bare chroot
        return [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    return []


def _is_open_on(number: int, file: os.stat_result) -> bool:
    with suppress(OSError):  # it was that of the list, or is closed by now
        return os.path.samestat(os.fstat(number), file)
    return False


def _never_unmap() -> None:
    """Keep the objects in a child for good: it may have memory of its own there by then, which would be unmapped."""
    for pages in _MAPPED:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pages))


os.register_at_fork(after_in_child=_never_unmap)
