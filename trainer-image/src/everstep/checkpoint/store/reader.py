"""A file that is open for many reads of pieces: as an object of a folder, or as a part in a node's memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.checkpoint.errors import Damaged


class FileReader:
    """Reads of one descriptor, which belongs to whoever opened it."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset`.

        Raises:
            Damaged: The file ends before them.
            OSError: The file system cannot read them.
        """
        rest = into.cast("B")
        while rest:
            count = os.preadv(self._descriptor, [rest], offset)
            if not count:
                raise Damaged(self._name, f"ends at byte {offset}, {len(rest)} bytes too early")
            offset, rest = offset + count, rest[count:]

    def expect(self, offset: int, length: int) -> None:
        """Let the system read ahead, where it can."""
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)


@contextmanager
def open_file(path: Path, name: str) -> Iterator[FileReader]:
    """Open a file; `name` is what messages call it. OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield FileReader(descriptor, name)
    finally:
        os.close(descriptor)
