"""Memory that outlives its processes: /dev/shm, System V IPC, message queues. Between generations nothing survives but
the copies of checkpoints from which the next one restores.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
from pathlib import Path
from typing import Any, Callable

_IPC_RMID = 0
# Of the stores that ranks saved to, one folder of slots each. A script that names another store at each start must not
# fill the pod's memory with what it will never ask for again.
KEPT_STORES = 2
_ESCAPE = re.compile(rb"\\([0-7]{3})")  # how the kernel writes blanks and backslashes in names of mounts


def clear_shared_memory(shm: Path | None, *, owns_ipc: bool, slots: Path | None = None) -> str | None:
    """Empty what a pod alone sees, and leave alone what other pods of its machine see too.

    Args:
        shm: The folder of shared memory; None where others see it.
        owns_ipc: Whether the pod has an IPC namespace of its own.
        slots: The folder of the slots of checkpoints, of which only those of the newest stores stay; None: nothing has
            any.

    Returns:
        What could not be removed, or None.
    """
    left = []
    if shm is not None:
        left += _empty_folder(shm)
    if slots is not None:
        left += _remove_old_slots(slots)
    if owns_ipc:
        left += _empty_folder(Path("/dev/mqueue"))
        _remove_system_v_ipc()
    return f"not removed: {', '.join(left[:8])}" if left else None


def _remove_old_slots(slots: Path) -> list[str]:
    left = []
    with contextlib.suppress(OSError):  # not there: the user has another memory for them
        for folder in sorted(slots.iterdir(), key=_find_last_change, reverse=True)[KEPT_STORES:]:
            try:
                shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink()
            except OSError as error:
                left.append(f"{folder} ({error.strerror})")
    return left


def _find_last_change(folder: Path) -> float:
    """Return when something in a folder of slots was last written, in seconds since 1970."""
    newest = 0.0
    for path in (folder, *(() if folder.is_symlink() else folder.rglob("*"))):
        with contextlib.suppress(OSError):  # removed meanwhile
            newest = max(newest, path.lstat().st_mtime)
    return newest


def _empty_folder(folder: Path) -> list[str]:
    """Empty a folder, but for what is mounted below it: a volume at /dev/shm/cache is its owner's, as any other is."""
    with contextlib.suppress(OSError):  # not there; or nobody knows what is mounted, and then nothing may be removed
        mounted = _list_mounts_below(folder.resolve())
        return _remove_entries(folder.resolve(), mounted, {parent for path in mounted for parent in path.parents})
    return []


def _remove_entries(folder: Path, mounted: set[Path], parents: set[Path]) -> list[str]:
    left = []
    for entry in folder.iterdir():
        try:
            if entry in mounted:
                continue
            if entry in parents:
                left += _remove_entries(entry, mounted, parents)
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        except OSError as error:
            left.append(f"{entry} ({error.strerror})")
    return left


def _list_mounts_below(folder: Path) -> set[Path]:
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = (Path(os.fsdecode(_ESCAPE.sub(_unescape, line.split(b" ")[4]))) for line in lines)
    return {point for point in points if folder in point.parents}


def _unescape(found: re.Match[bytes]) -> bytes:
    return bytes([int(found.group(1), 8)])


def _remove_system_v_ipc() -> None:
    """Segments, semaphores and queues of our user (those of another one cannot be removed and are none of ours)."""
    libc: Any = ctypes.CDLL(None)
    removers: dict[str, tuple[str, Callable[[int], int]]] = {
        "shm": ("shmid", lambda key: libc.shmctl(key, _IPC_RMID, None)),
        "sem": ("semid", lambda key: libc.semctl(key, 0, _IPC_RMID)),
        "msg": ("msqid", lambda key: libc.msgctl(key, _IPC_RMID, None)),
    }
    for kind, (column, remove) in removers.items():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            header, *rows = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()
            names = header.split()
            for row in rows:
                fields = dict(zip(names, row.split()))
                if int(fields["uid"]) == os.getuid():
                    remove(int(fields[column]))
