"""Files in a node's shared memory: made whole, with memory that is really there, in a folder that is ours alone."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.checkpoint.errors import CheckpointError

_ATTEMPTS = 100
MEMORY_VARIABLE = "EVERSTEP_CHECKPOINT_MEMORY"


def secure(directory: Path) -> None:
    """Make the directory, or see that it is ours: in a memory that all may write, another user could have made it.

    Raises:
        CheckpointError: It is somebody else's, or others may enter it.
    """
    found = _make_directory(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise CheckpointError(
            f"{directory} is not a directory of our own that nobody else may enter: remove it, "
            f"or name another memory in {MEMORY_VARIABLE}"
        )


def _make_directory(directory: Path) -> os.stat_result:
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
        with contextlib.suppress(FileNotFoundError):  # the writer of a run that ends removes it at this moment
            return directory.lstat()
    raise CheckpointError(f"{directory} is removed again and again by another process: see who has it")


def allocate_file(path: Path, size: int) -> None:
    """Let a file have at least so many bytes of memory; it never shrinks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            # Pages that exist: a copy into a hole would end in SIGBUS when memory runs out, this is an error here.
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def find_size(path: Path) -> int:
    """Return the bytes of a file, 0 where it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def replace_file(path: Path, content: bytes | Mapping[str, object]) -> None:
    """Write a small file so that it is there whole or not at all, whenever this process dies."""
    data = content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(data)
    draft.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None where none is."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
