"""Counts the processes of this container that the kernel killed for want of memory, by the memory cgroup's counters."""

from __future__ import annotations

from pathlib import Path


def find_oom_counter() -> Path | None:
    """Return the file with a line `oom_kill N` (v2 memory.events, v1 memory.oom_control), or None where there is none.

    With a cgroup namespace or a container's bind mount the own group is the mount's root; on a bare machine it lies at
    the path in /proc/self/cgroup. Under v2, memory.oom.group lets the kernel kill the agent too: then nobody counts.
    """
    base = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    candidates = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            base_v1 = base / "memory"
            candidates += [base_v1 / path.lstrip("/") / "memory.oom_control", base_v1 / "memory.oom_control"]
        elif not controllers:
            candidates += [base / path.lstrip("/") / "memory.events", base / "memory.events"]
    return next((path for path in candidates if count_oom_kills(path) is not None), None)


def count_oom_kills(path: Path | None) -> int | None:
    """Return the number of processes killed so far; None where the kernel does not say."""
    if path is None:
        return None
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None
