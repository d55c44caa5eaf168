"""Define every call of the POSIX store that changes the file system: one seam, where tests stop, fail and record.

No call is repeated: what a failed fsync has left in the page cache is not known (Rebello et al., "Can Applications
Recover from fsync Failures?", ATC 2020).
"""

from __future__ import annotations

import os
from pathlib import Path


class Files:
    """The calls themselves; OSError as the system gives it. `where` of sync_folder may be any folder that exists."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> int:
        """Create a file that did not exist, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        """Write data, and return how many bytes were written, maybe not all."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """The file's bytes and size are on the disk; its name may not be."""
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """The names in this folder are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def link(self, old: Path, new: Path) -> None:
        """A second name for a file; FileExistsError, atomically, if the new one is taken."""
        os.link(old, new)

    def rename(self, old: Path, new: Path) -> None:
        """`new` is replaced, atomically for readers."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """OSError unless it is empty."""
        path.rmdir()
