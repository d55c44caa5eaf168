"""Files in a node's shared memory: made whole, with memory that is really there, in a folder that is ours alone."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.host.available_memory import ENLARGING

T = TypeVar("T")

_ATTEMPTS = 100
MEMORY_VARIABLE = "EVERSTEP_CHECKPOINT_MEMORY"
_ANOTHER = f"name another memory: MemoryOptions(directory=…) or {MEMORY_VARIABLE}"
_FULL = {errno.ENOSPC, errno.EDQUOT}


def secure_directory(directory: Path) -> None:
    """Make the directory, or see that it is ours: in a memory that all may write, another user could have made it.

    Raises:
        CheckpointError: It is somebody else's, others may enter it, or it cannot be made.
    """
    try:
        found = _make_directory(directory)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be made for slots by user {_name_user(os.geteuid())}: {error}; make it possible, or "
            f"{_ANOTHER}"
        ) from error
    if (why := _find_stranger(found)) is not None:
        raise CheckpointError(_tell_stranger(directory, why))


def check_is_own(directory: Path) -> None:
    """See that a directory of slots, where there is one, is ours alone; make nothing.

    Raises:
        CheckpointError: It is somebody else's, or others may enter it.
    """
    try:
        why = _find_stranger(directory.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        why = "is in a folder that we may not enter"
    if why is not None:
        raise CheckpointError(_tell_stranger(directory, why))


def is_own(directory: Path) -> bool:
    """Tell whether a directory of slots is there and ours alone. What is in another user's is never read: a restore
    takes nothing from there, and somebody could have put anything there."""
    try:
        return _find_stranger(directory.lstat()) is None
    except OSError:
        return False


def _find_stranger(found: os.stat_result) -> str | None:
    """Return why a directory is not ours alone."""
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory of its own, but a file or a link"
    if found.st_uid != os.geteuid():
        return f"belongs to user {_name_user(found.st_uid)}"
    if found.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, so that others may enter it; it must be 0700"
    return None


def _tell_stranger(directory: Path, why: str) -> str:
    return (
        f"{directory} {why}: it is not a directory of our own that nobody else may enter, and user "
        f"{_name_user(os.geteuid())} saves nothing there. When no run uses it any more, let its owner or root remove "
        f"it, or {_ANOTHER}; to go on from the store needs neither"
    )


def _name_user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    return str(number)


def _make_directory(directory: Path) -> os.stat_result:
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
        with contextlib.suppress(FileNotFoundError):  # the writer of a run that ends removes it at this moment
            return directory.lstat()
    raise CheckpointError(f"{directory} is removed again and again by another process: see who has it")


@contextlib.contextmanager
def naming_full_memory(path: Path, need: int) -> Iterator[None]:
    """Say of an error for lack of space where that is, how much there is, and what makes it more.

    Args:
        path: The file that is written.
        need: Bytes that it is to have.

    Raises:
        OSError: The same error, with the reason in words.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(error.errno, _tell_full(path, need, error), str(path)) from error


def _tell_full(path: Path, need: int, error: OSError) -> str:
    found, files = shutil.disk_usage(path.parent), os.statvfs(path.parent)
    inodes = f" and {files.f_favail} of {files.f_files} inodes" if files.f_files else ""
    return (
        f"{os.strerror(error.errno or 0)}: the memory for checkpoints in {path.parent} has {found.free} of "
        f"{found.total} bytes{inodes} left, and a file of {need} bytes has no room there; enlarge it ("
        f"{ENLARGING}) or {_ANOTHER}"
    )


def allocate_file(path: Path, size: int) -> None:
    """Let a file have at least so many bytes of memory; it never shrinks."""
    with naming_full_memory(path, size):
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
    try:
        with naming_full_memory(path, len(data)):
            draft.write_bytes(data)
            draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()  # half of it would take what little room is left
        raise


def explain_removed(path: Path) -> str:
    """Return the words for a file or folder of slots that somebody has removed under a live run.

    Args:
        path: The slot, or the folder of all of them.
    """
    return (
        f"{path} was removed by another process while the run saved there: nothing but everstep may remove what is in "
        "the memory for checkpoints; the next save makes it anew"
    )


def list_files(directory: Path) -> list[Path]:
    """Return what is in a directory, in order; nothing where it has been removed by now, or is another user's."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None where none is."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_record(path: Path, kind: Callable[..., T]) -> T | None:
    """Return what a small file of a slot says of a checkpoint.

    Args:
        path: The file.
        kind: What is made of its fields.

    Returns:
        None where there is no such file, or where it says other things: those of another version of everstep.
    """
    fields = read_json(path)
    if fields is None:
        return None
    try:
        return kind(**{**fields, "key": Key.parse(str(fields["key"]))})
    except (KeyError, TypeError, ValueError):
        return None
