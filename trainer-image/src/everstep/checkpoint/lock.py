"""There is one writer in a slots' directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from everstep.checkpoint import slot_files


def lock(directory: Path, timeout: float) -> Callable[[], None]:
    """Waits at most `timeout` seconds; the lock ends with what it returns, or with the process. SystemExit."""
    path = directory / "writer.lock"
    until = time.monotonic() + timeout
    while True:
        slot_files.secure(directory)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("a"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The writer before us may have removed the directory, and our lock with it, when it ended.
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return stack.pop_all().close
        if time.monotonic() >= until:
            raise SystemExit(f"another writer has {directory}")
        time.sleep(0.05)
