"""Leftovers of a session of tests that must not exist: processes, and files in shared memory."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from everstep.checkpoint.slots.slot_files import MEMORY_VARIABLE

MARK = "EVERSTEP_TEST_SESSION"  # in the environment of all that this session starts
MEMORY = "EVERSTEP_TEST_MEMORY"  # a folder in shared memory, where there is some

_PATIENCE = 200.0  # seconds; a writer whose ranks were killed stays for `linger`, 120 where a script says nothing else


@contextmanager
def shared_memory() -> Iterator[None]:
    """Whatever tests put into shared memory goes into one folder, which must be empty at their end."""
    if not os.access("/dev/shm", os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="everstep-test-") as name:
        os.environ[MEMORY] = os.environ[MEMORY_VARIABLE] = name
        yield
        del os.environ[MEMORY], os.environ[MEMORY_VARIABLE]
        assert list(Path(name).iterdir()) == [], "this is left in shared memory"


def check(mark: str) -> None:
    """No process of the session runs any more, but those of Python's own that start others, which end with us."""
    end = time.monotonic() + _PATIENCE
    while left := processes(mark):
        assert time.monotonic() < end, f"these processes are left: {left}"
        time.sleep(0.05)


def processes(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            helper = int(parent) == os.getpid() and "from multiprocessing." in command
            if int(folder.name) != os.getpid() and state != "Z" and not helper:
                found.append(f"{folder.name}: {command[:200]}")
    return found
