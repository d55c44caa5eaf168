"""Check how much memory a node has for slots before the first save: a full tmpfs would end a rank by SIGBUS later."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError

CGROUPS = Path("/sys/fs/cgroup")

# An operating system that has no free page at all kills a process: the machine and each cgroup keep so much.
_SPARE_MEMORY = 64 << 20
# A file system of its own, as a container's /dev/shm of 64 MB, only needs room for the small files beside the parts.
_SPARE_FILES = 512 << 10

# Where the size of the memory for slots is said.
ENLARGING = (
    "spec.checkpoint.memory of a TrainingJob, sizeLimit of a pod's volume, --shm-size of a container, size= of a tmpfs"
)


class InsufficientMemory(CheckpointError):
    """The slots do not fit; the message says by how much and what to change."""


def check_memory(directory: Path, need: int, copies: int, kept: int = 0) -> None:
    """Raise InsufficientMemory unless `need` more bytes fit into the file system, our cgroups and the memory.

    `copies` and `kept`, for the message: slots of this node, and copies of another's.
    """
    if need <= 0:
        return
    on_files = shutil.disk_usage(directory).free
    rooms = [
        (on_files, _SPARE_FILES, f"the file system of {directory}", f"give it more ({ENLARGING})"),
        (_get_machine_memory(), _SPARE_MEMORY, "this machine", "use a greater one"),
        *(
            (free, _SPARE_MEMORY, f"the memory limit of cgroup {name}", "raise the limit")
            for free, name in iterate_cgroup_limits()
        ),
    ]
    free, spare, where, remedy = min(rooms, key=lambda room: room[0] - room[1])
    if need + spare > free:
        fewer = " or use MemoryOptions(slots=1)" * (max(copies, kept) > 1) + " or MemoryOptions(peers=0)" * (kept > 0)
        parts = [f"{copies} slot{'s' * (copies > 1)} for checkpoints"] if copies else []
        parts += [f"{kept} cop{'ies' if kept > 1 else 'y'} of another node's slots"] if kept else []
        raise InsufficientMemory(
            f"{' and '.join(parts)} need {_format_size(need)} more memory, {where} has {_format_size(free)} left, and "
            f"{_format_size(spare)} must stay free: {_format_size(need + spare - free)} are missing; {remedy}{fewer}"
        )


def check_files(directory: Path, largest: int, count: int) -> None:
    """See that `count` more files may be made in a directory, of up to `largest` bytes each.

    Raises:
        InsufficientMemory: The limit of a file is less, or the file system has fewer inodes left.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if resource.RLIM_INFINITY != limit < largest:
        raise InsufficientMemory(
            f"a rank's part has up to {_format_size(largest)}, and a file of this user {_format_size(limit)} at most "
            "(ulimit -f): raise the limit"
        )
    found = os.statvfs(directory)
    if found.f_files and found.f_favail < count:
        raise InsufficientMemory(
            f"the slots are up to {count} files, and the file system of {directory} has {found.f_favail} inodes left "
            "(df -i): give it more (nr_inodes)"
        )


def get_available_memory() -> int:
    """Return the bytes of memory that can be had: the least of what the machine and each cgroup above us has left."""
    return min([_get_machine_memory(), *(left for left, _ in iterate_cgroup_limits())])


def _get_machine_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def iterate_cgroup_limits(own: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> Iterator[tuple[int, str]]:
    """(bytes left, name) of each cgroup above us that has a memory limit, of either version."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = base / path.lstrip("/")
        for each in (group, *group.parents):
            if not each.is_relative_to(base):
                break
            left = _read_memory_left(each, *files)
            if left is not None:
                yield left, f"/{each.relative_to(base)}"


def _read_memory_left(group: Path, limit: str, usage: str) -> int | None:
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        if not most.isdecimal() or int(most) >= 1 << 60:  # version 1 says "none" by a great number
            return None
        # Clean pages of files are counted as used but given back under pressure.
        rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(row[1]) for row in rows if row[0] in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return None
    return int(most) - used + cached


def _format_size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e8 else f"{count / 1e6:.1f} MB"
