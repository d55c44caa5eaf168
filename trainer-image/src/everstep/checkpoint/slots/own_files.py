"""Tell what a directory of slots holds of ours from whatever else lies there: nothing of anybody else's is removed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.slots.slot_files import MEMORY_VARIABLE, list_files

SOCKET = "control"
LOG = "writer.log"
LOCK = "writer.lock"
LAYOUTS = "layouts"
PORT = "port"
COPIES = "peer"
RESTORES = "restore-"  # and a random name: what a restore brings into a memory that is a mount

_FILES = {SOCKET, LOG, LOCK, PORT}
_LAYOUT = re.compile(r"[0-9a-f]{32}\.json", re.ASCII)
_IN_SLOT = re.compile(r"(?:\d+|claim|slot)\.json|\d+\.part|whole|stored|verified|lock", re.ASCII)
_DRAFT = re.compile(r"\.(.+)\.\d+", re.ASCII)  # of slot_files.replace_file()
_RESTORE = re.compile(rf"{RESTORES}[0-9a-f]{{16}}", re.ASCII)
_OF_FILE_SYSTEM = "lost+found"  # of one that was made for slots
_SHOWN = 3


def is_own_entry(path: Path) -> bool:
    """Tell whether everstep has put a file or folder, with all that is in it, into a directory of slots."""
    name = path.name
    if name in _FILES or _is_draft(name, _FILES.__contains__):
        return not path.is_dir()
    if name.isdecimal():
        return _holds_only(path, _is_slot_file)
    if name == LAYOUTS:
        return _holds_only(path, lambda each: bool(_LAYOUT.fullmatch(each)))
    if name == COPIES:
        return path.is_dir() and not path.is_symlink() and all(map(is_own_entry, list_files(path)))
    return name.startswith(f".{path.parent.name}.removed-") or bool(_RESTORE.fullmatch(name))


def check_holds_slots_only(directory: Path) -> None:
    """See that a directory for slots, where there is one, holds nothing but slots: it goes when its runs have ended.

    Raises:
        CheckpointError: Something else lies there.
    """
    strangers = [path.name for path in list_files(directory) if _is_foreign(path) and path.name != _OF_FILE_SYSTEM]
    if strangers:
        more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
        raise CheckpointError(
            f"{directory} holds what is no slot: {', '.join(strangers[:_SHOWN])}{more}. The memory for checkpoints is "
            "a directory of its own, which is removed when its runs have ended: name another one, there or not, in "
            f"MemoryOptions(directory=…) or {MEMORY_VARIABLE}"
        )


def _is_foreign(path: Path) -> bool:
    # The writer of a run that has ended may remove the directory between two looks at it: what is gone is nobody's.
    return not is_own_entry(path) and os.path.lexists(path) and not is_own_entry(path)


def _is_slot_file(name: str) -> bool:
    return bool(_IN_SLOT.fullmatch(name)) or _is_draft(name, _is_slot_file)


def _is_draft(name: str, means: Callable[[str], bool]) -> bool:
    found = _DRAFT.fullmatch(name)
    return found is not None and means(found[1])


def _holds_only(folder: Path, means: Callable[[str], bool]) -> bool:
    inside = [path for path in list_files(folder) if not (means(path.name) or _is_draft(path.name, means))]
    return folder.is_dir() and not folder.is_symlink() and not inside
