"""Memory that outlives its processes: /dev/shm, System V IPC, message queues. Between generations nothing survives."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path
from typing import Any, Callable

_IPC_RMID = 0


def clear_shared_memory(shm: Path | None, *, owns_ipc: bool) -> str | None:
    """Empty what a pod alone sees, and leave alone what other pods of its machine see too.

    Args:
        shm: The folder of shared memory; None where others see it.
        owns_ipc: Whether the pod has an IPC namespace of its own.

    Returns:
        What could not be removed, or None.
    """
    left = []
    if shm is not None:
        left += _empty_folder(shm)
    if owns_ipc:
        left += _empty_folder(Path("/dev/mqueue"))
        _remove_system_v_ipc()
    return f"not removed: {', '.join(left[:8])}" if left else None


def _empty_folder(folder: Path) -> list[str]:
    left = []
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            try:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            except OSError as error:
                left.append(f"{entry} ({error.strerror})")
    return left


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
