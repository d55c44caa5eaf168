"""Recognize what a pod or its node lacks, and say what to do about it.

Such a fault is never a mistake of the application, and is not charged to it.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

_FULL = "free space on the node's disk, or give the volume (or the pod's ephemeral-storage) more"
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: f"its quota is used up: {_FULL}",
    errno.EROFS: "a node whose disk has failed is often read-only: look at the node's kernel log",
    errno.EIO: "a disk or a network volume of the node fails: look at the node's kernel log",
    errno.ESTALE: "a network volume has lost its server's file: mount it again",
    errno.EAGAIN: "no more processes or threads may be started: raise the pod's limit of processes (podPidsLimit)",
    errno.ENOMEM: "the node or the pod has no memory left: raise resources.limits.memory, or use another node",
    errno.EMFILE: "raise the container's limit of open files",
    errno.ENFILE: "raise the node's limit of open files (fs.file-max)",
}
# What keeps a program from being executed, though nothing is wrong with the program.
_POD_FAULTS = frozenset((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE))


def is_pod_fault(error: Exception) -> bool:
    """Tell whether a program that cannot be executed might be, by the same command, in another pod.

    Args:
        error: What `subprocess.Popen` raised.

    Returns:
        False for a program that is missing, is no program or may not be executed.
    """
    return isinstance(error, OSError) and error.errno in _POD_FAULTS


def explain_fault(error: BaseException) -> str:
    """Return where something failed, how, and what to do about it."""
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        code = errno.EAGAIN
    said = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    advice = _ADVICE.get(code) if code is not None else None
    return f"{said}: {advice}" if advice else said


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Give `path` to errors that do not name a file: a write to a full volume fails long after the file was opened."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
