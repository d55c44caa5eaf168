"""Reads the kernel's table of processes: who runs, whose child it is, and in which container."""

from __future__ import annotations

import os
from pathlib import Path


def read_stat(pid: int) -> tuple[str, str, int] | None:
    """Return (command name, state, parent) from /proc; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may itself hold parentheses
    fields = rest.split()
    return name, fields[0], int(fields[1])


def is_in_our_container(pid: int) -> bool:
    """Tell by its cgroups; true where that cannot be known."""
    ours, theirs = _read_cgroups("self"), _read_cgroups(str(pid))
    return all(
        name not in ours or path == ours[name] or (path.startswith(f"{ours[name].rstrip('/')}/") and "/.." not in path)
        for name, path in theirs.items()
    )


def _read_cgroups(pid: str) -> dict[str, str]:
    """Return the path in each hierarchy; nothing of a process that has ended."""
    stat = read_stat(int(pid)) if pid.isdecimal() else None
    if stat is not None and stat[1] in ("Z", "X"):  # it has left its cgroup already
        return {}
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return {}
    return {name: path for _, name, path in (line.split(":", 2) for line in lines)}


def read_parents() -> dict[int, int]:
    """Return the parent of every process."""
    parents = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - pathlib would stat each of them
        if entry.isdecimal():
            stat = read_stat(int(entry))
            if stat is not None:
                parents[int(entry)] = stat[2]
    return parents


def list_children() -> dict[int, list[int]]:
    """Return the children of every process that has any."""
    children: dict[int, list[int]] = {}
    for pid, parent in read_parents().items():
        children.setdefault(parent, []).append(pid)
    return children


def format_pids(pids: list[int]) -> str:
    """Return the first of them, as a message lists them."""
    return ", ".join(map(str, pids[:8]))


def describe_process(pid: int) -> str:
    """Return how a message names a process: its PID, its command and its state."""
    stat = read_stat(pid)
    return f"{pid} (gone)" if stat is None else f"{pid} ({stat[0]}, state {stat[1]})"
