"""Tell whether the files of a folder are on this machine, or come over a network when they are not in its cache."""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

# Of FUSE nobody knows what is behind it.
_REMOTE = re.compile(r"nfs\d*|cifs|smb\d*|9p|afs|ceph|lustre|gpfs|beegfs|glusterfs|pvfs2|orangefs|virtiofs|fuse(\..*)?")


def is_on_this_machine(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Return whether the file system under `folder` keeps its files on this machine.

    Args:
        folder: A folder that need not be there yet.
        mounts: The system's table of mounts (proc(5), mountinfo); where there is none, nothing is known.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
        resolved = folder.resolve()
    except (OSError, RuntimeError):  # before Python 3.13 a loop of links is the latter
        return False
    found: tuple[int, str] | None = None
    for line in lines:
        left, _, right = line.partition(" - ")
        point = Path(_unescape_mount(left.split(" ")[4]))
        # Of two mounts at the same place the later one is seen.
        if resolved.is_relative_to(point) and (found is None or len(point.parts) >= found[0]):
            found = len(point.parts), right.split(" ")[0]
    return found is not None and not _REMOTE.fullmatch(found[1])


def _unescape_mount(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
