"""Folders in which something is made beside the place that it is for, and what those who died have left of them.

A place on a shared mount may be made by several nodes at the same time, so nobody removes what is still being made.
Whether its process lives is known by a lock where both have the same mount, on the same machine; of others only that
nothing has changed for long.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError

_PREFIX = ".everstep-"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_DEAD_AFTER = 3600.0  # seconds without a change


@contextmanager
def make_unfinished_folder(into: Path) -> Iterator[Path]:
    """A new folder on the file system of `into`, whose parent exists. It goes with all that is still in it."""
    while True:
        path = into.with_name(f"{_PREFIX}{into.name}-{_identify_mount(into.parent)}-{secrets.token_hex(4)}")
        path.mkdir()
        with _hold_lock(path) as lock:
            # Between the two lines above somebody may have taken it for a dead one's.
            if lock is _Lock.THEIRS or not path.exists():
                continue
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)
            return


def clear_unfinished(into: Path, clock: Callable[[], float] = time.time) -> None:
    """Remove what processes that died have left beside `into`."""
    pattern = re.compile(rf"{re.escape(_PREFIX + into.name)}-(.+)-[0-9a-f]{{8}}")
    here = _identify_mount(into.parent)
    for path in into.parent.iterdir():
        found = pattern.fullmatch(path.name)
        if not found:
            continue
        with _hold_lock(path) as lock:
            dead = lock is _Lock.OURS and found[1] == here
            if dead or (lock is not _Lock.THEIRS and clock() - _get_newest_change(path) > _DEAD_AFTER):
                shutil.rmtree(path, ignore_errors=True)


def put_in_place(made: Path, into: Path, *, replace: bool) -> None:
    """Rename a folder to where it belongs; with `replace` whatever is there goes into `made`'s folder.

    Where others do the same, each puts a whole folder, and the last one's stays. CheckpointError.
    """
    try:
        while not _try_rename(made, into):
            if not replace:
                raise CheckpointError(f"{into} was created by another process meanwhile")
            with suppress(FileNotFoundError):
                into.rename(made.with_name(secrets.token_hex(4)))
    except OSError as error:
        raise CheckpointError(
            f"{into} cannot be put in place: {error.strerror}; a mount point cannot be replaced, a folder in it can"
        ) from error


def _try_rename(made: Path, into: Path) -> bool:
    """False when something is there."""
    try:
        made.rename(into)
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


class _Lock(enum.Enum):
    OURS = enum.auto()
    THEIRS = enum.auto()
    UNKNOWN = enum.auto()  # there are no locks on this file system, or no such folder


@contextmanager
def _hold_lock(path: Path) -> Iterator[_Lock]:
    """Whose the folder is meanwhile."""
    with ExitStack() as stack:
        lock = _Lock.UNKNOWN
        with suppress(OSError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock = _Lock.OURS
            except BlockingIOError:
                lock = _Lock.THEIRS
        yield lock


def _identify_mount(folder: Path) -> str:
    """Two processes with the same one see each other's locks."""
    try:
        boot = _BOOT.read_text()[:8]
    except OSError:
        boot = f"{uuid.getnode():x}"
    return f"{boot}.{folder.stat().st_dev:x}"


def _get_newest_change(path: Path) -> float:
    """Return the newest change in a tree, in seconds since 1970, by what nobody can set.

    Files get the times they had.
    """
    newest = 0.0
    for each in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            newest = max(newest, each.lstat().st_ctime)
    return newest
