"""Finds who has to hear of a signal that is sent to the ranks, beside the ranks themselves.

Shells pass no signals on, and a launcher without a handler (`accelerate launch` of one process) cannot: it dies at
once, and what it ran goes on, to which a stop is told as well. Not to the whole group: data loader workers that die of
a TERM would fail the checkpoint that their parent, which has a handler, writes because of it. Nor to the filters that
read what such a process prints (`train.py | tee log`): it would fail by the broken pipe, and they end after it anyway.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .process_table import list_children, read_stat

_SHELLS = frozenset(("sh", "bash", "dash", "ash", "busybox", "zsh", "ksh"))

_Pipe = tuple[int, int]  # device and inode


@dataclass(frozen=True)
class SignalTargets:
    """PIDs: `heard` are sent the signal; `filters` are not, and end once those have."""

    heard: frozenset[int]
    filters: frozenset[int]


def list_signal_targets(pids: Iterable[int], signum: int) -> SignalTargets:
    """Return who has to hear of a signal.

    Args:
        pids: The ranks that run.
        signum: The signal.

    Returns:
        They, and those of their descendants that would not hear of it by them.
    """
    main = set(pids)  # started here, or by a shell: what the command is about
    found: dict[int, bool] = {}  # whether it is there to handle the signal, or may be
    queue = list(main)
    children: dict[int, list[int]] | None = None
    while queue:
        current = queue.pop()
        about = read_stat(current)
        if about is None:
            continue
        masks, bit = read_signal_masks(current), 1 << (signum - 1)
        expected = not masks or any(mask & bit for mask in masks.values())
        if current in main or not masks.get("SigIgn", 0) & bit:  # else a helper that would only be waited for
            found[current] = expected
        shell = about[0] in _SHELLS or _program_name(current) in _SHELLS
        if shell or not expected:
            children = list_children() if children is None else children
            below = children.get(current, [])
            queue += below
            main.update(below if shell else ())
    filters = _list_filters(found)
    return SignalTargets(frozenset(found) - filters, filters)


def _list_filters(found: dict[int, bool]) -> frozenset[int]:
    """Return those that die of the signal and read what one prints that does not, or what another filter prints."""
    writers = {pid for pid, expected in found.items() if expected}
    readers = {
        pid: pipe for pid, expected in found.items() if not expected and (pipe := _find_pipe(pid, 0)) is not None
    }
    filters: set[int] = set()
    while writers and readers:
        printed = {_find_pipe(pid, descriptor) for pid in writers for descriptor in (1, 2)}
        writers = {pid for pid, pipe in readers.items() if pipe in printed}
        readers = {pid: pipe for pid, pipe in readers.items() if pid not in writers}
        filters |= writers
    return frozenset(filters)


def _find_pipe(pid: int, descriptor: int) -> _Pipe | None:
    """Return the pipe that a descriptor of a process is; None if it is none, or nobody may look."""
    try:
        about = os.stat(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH116 - one call
    except OSError:
        return None
    return (about.st_dev, about.st_ino) if stat.S_ISFIFO(about.st_mode) else None


def read_signal_masks(pid: int) -> dict[str, int]:
    """Return the signals that a process blocks, ignores and has handlers for: it does not simply die of them.

    Empty where nobody knows: the process has ended, or the kernel does not tell, as that of gVisor.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
        fields = dict(line.decode("latin-1").split(":", 1) for line in lines if line.startswith(b"Sig"))
        return {name: int(fields[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt")}
    except (OSError, ValueError, KeyError):
        return {}


def _program_name(pid: int) -> str:
    """Return the name of the file that runs: that of the shell where the command name is a script's (`#!/bin/sh`)."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # it has ended, or may not be looked at
        return ""
