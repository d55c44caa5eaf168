"""Ensure that there is one writer in a slots' directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import IO

from everstep.checkpoint.slots import own_files, slot_files


class DirectoryLock:
    """The lock of a slots' directory; it ends with release(), or with the process."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path = path
        self._file = file

    @property
    def is_valid(self) -> bool:
        """Tell whether the directory is still the one that was locked.

        Somebody may have removed it, and another process may have made it anew.
        """
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def release(self) -> None:
        """Let another process have the directory."""
        self._file.close()


def lock_directory(directory: Path, timeout: float) -> DirectoryLock:
    """Lock a slots' directory, after waiting at most `timeout` seconds for it.

    Raises:
        SystemExit: Another process has it.
    """
    path = directory / own_files.LOCK
    until = time.monotonic() + timeout
    while True:
        slot_files.secure_directory(directory)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("a"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The writer before us may have removed the directory, and our lock with it, when it ended.
                if (found := DirectoryLock(path, file)).is_valid:
                    stack.pop_all()
                    return found
        if time.monotonic() >= until:
            raise SystemExit(f"another writer has {directory}")
        time.sleep(0.05)
