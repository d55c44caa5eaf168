"""Finds who has to hear of a signal that is sent to the ranks, beside the ranks themselves.

Shells pass no signals on, and a launcher without a handler (`accelerate launch` of one process) cannot: it dies at
once, and what it ran goes on, to which a stop is told as well. Not to the whole group: data loader workers that die of
a TERM would fail the checkpoint that their parent, which has a handler, writes because of it. Nor to whoever reads what
such a process prints, be it a filter (`train.py | tee log`) or the launcher itself (`conda run`): it would fail by the
broken pipe, and they end after it anyway.

A shell with a trap may well pass a signal on, to what runs in its background (`trap 'kill $!' TERM; train.py & wait`):
trap_relay.py sees to it that this is one signal and not two.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from .process_table import list_children, read_stat

_SHELLS = frozenset(("sh", "bash", "dash", "ash", "busybox", "zsh", "ksh"))

_PTMX = os.makedev(5, 2)  # /dev/ptmx, the side of a pseudo-terminal from which a launcher reads
_PTS_MAJOR = 136

_Pipe = tuple[int, int]  # device and inode; of a pseudo-terminal -1 and its number


class SignalTargets(NamedTuple):
    """PIDs: `heard` are sent the signal; `filters` are not, and end once those have. `trapped` are those of `heard` to
    which the trap of a shell may send it as well, each with this shell."""

    heard: frozenset[int]
    filters: frozenset[int]
    trapped: Mapping[int, int] = MappingProxyType({})


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
    traps: dict[int, int] = {}  # the shell above that has a trap
    queue = list(main)
    children: dict[int, list[int]] | None = None
    while queue:
        current = queue.pop()
        about = read_stat(current)
        if about is None:
            continue
        masks, bit = read_signal_masks(current), 1 << (signum - 1)
        expected = not masks or any(masks[name] & bit for name in ("SigBlk", "SigIgn", "SigCgt"))
        if current in main or not masks.get("SigIgn", 0) & bit:  # else a helper that would only be waited for
            found[current] = expected
        shell = about[0] in _SHELLS or _program_name(current) in _SHELLS
        if shell or not expected:
            children = list_children() if children is None else children
            below = children.get(current, [])
            queue += below
            main.update(below if shell else ())
            trap = current if shell and masks.get("SigCgt", 0) & bit else traps.get(current)
            if trap is not None:
                traps.update(dict.fromkeys(below, trap))
    filters = _list_filters(found)
    heard = frozenset(found) - filters
    # In the foreground, what a shell runs is all that it waits for: a trap begins after its end.
    trapped = {pid: traps[pid] for pid in heard if pid in traps and _runs_in_background(pid)}
    return SignalTargets(heard, filters, trapped)


def _list_filters(found: dict[int, bool]) -> frozenset[int]:
    """Return those that die of the signal and read what one prints that does not, or what another filter prints."""
    writers = {pid for pid, expected in found.items() if expected}
    readers = {pid: pipes for pid, expected in found.items() if not expected and (pipes := _list_read_pipes(pid))}
    filters: set[int] = set()
    while writers and readers:
        printed = {_find_pipe(pid, descriptor) for pid in writers for descriptor in (1, 2)}
        writers = {pid for pid, pipes in readers.items() if pipes & printed}
        readers = {pid: pipes for pid, pipes in readers.items() if pid not in writers}
        filters |= writers
    return frozenset(filters)


def _list_read_pipes(pid: int) -> set[_Pipe | None]:
    """Return the pipes from which a process can read; none if nobody may look."""
    try:
        descriptors = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH208 - names alone
    except OSError:
        return set()
    return {_find_pipe(pid, descriptor) for descriptor in descriptors if _can_read(pid, descriptor)} - {None}


def _find_pipe(pid: int, descriptor: int) -> _Pipe | None:
    """Return the pipe, or pseudo-terminal, that a descriptor of a process is; None if it is none, or nobody may
    look."""
    try:
        about = os.stat(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH116 - one call
    except OSError:
        return None
    if stat.S_ISFIFO(about.st_mode):
        return about.st_dev, about.st_ino
    if about.st_rdev == _PTMX:
        number = _read_about_descriptor(pid, descriptor).get("tty-index", "")
        return (-1, int(number)) if number.isdecimal() else None
    return (-1, os.minor(about.st_rdev)) if os.major(about.st_rdev) == _PTS_MAJOR else None


def _can_read(pid: int, descriptor: int) -> bool:
    flags = _read_about_descriptor(pid, descriptor).get("flags", "")
    return int(flags, 8) & os.O_ACCMODE != os.O_WRONLY if flags.isdecimal() else descriptor == 0


def _read_about_descriptor(pid: int, descriptor: int) -> dict[str, str]:
    """Return what the kernel tells of an open file; nothing where nobody may look."""
    try:
        lines = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _runs_in_background(pid: int) -> bool:
    """Tell whether a shell started it, or what started it, with `&`: POSIX has it ignore INT and QUIT then."""
    ignored = read_signal_masks(pid).get("SigIgn", 0)
    return all(ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGQUIT))


def read_signal_masks(pid: int) -> dict[str, int]:
    """Return the signals that a process blocks, ignores and has handlers for: it does not simply die of them; and those
    that wait for it, alone or with its threads.

    Empty where nobody knows: the process has ended, or the kernel does not tell, as that of gVisor.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
        fields = dict(line.decode("latin-1").split(":", 1) for line in lines if line.startswith((b"Sig", b"Shd")))
        return {name: int(fields[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")}
    except (OSError, ValueError, KeyError):
        return {}


def _program_name(pid: int) -> str:
    """Return the name of the file that runs: that of the shell where the command name is a script's (`#!/bin/sh`)."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # it has ended, or may not be looked at
        return ""
