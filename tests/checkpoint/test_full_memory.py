"""If the memory for checkpoints is full, the message names it, its free space, and the ways to enlarge it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.format.manifest import Attempt, CheckpointPart, Chunk, Key, Manifest
from everstep.checkpoint.restore.node_cache import NodeCache
from everstep.checkpoint.slots.slot_files import replace_file
from everstep.checkpoint.slots.slot_marks import leave_mark
from everstep.checkpoint.slots.slots import Claim, PartRecord, Slots

KEY = Key(Attempt(0, 1), 20)
MANIFEST = Manifest(
    KEY, 1, 1, "", "xxh3_64", 0.0, (CheckpointPart(f"{KEY.data_prefix}0.part", 4096, "0" * 16),), {}, {}
)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def in_slots(write: Callable[[Slots], object]) -> Callable[[Path], Path]:
    def run(folder: Path) -> Path:
        write(Slots(folder))
        return folder

    return run


def in_cache(write: Callable[[NodeCache], object]) -> Callable[[Path], Path]:
    def run(folder: Path) -> Path:
        cache = NodeCache(folder, "try", shared=True)
        cache.create()
        try:
            write(cache)
        finally:
            cache.remove()
        return folder.parent

    return run


WRITES = {
    "a slot's parts": in_slots(lambda slots: slots.reserve([8192], 1)),
    "whose a slot is": in_slots(lambda slots: slots[0].claim(Claim(KEY, 1, 0, 1))),
    "that a rank is done": in_slots(
        lambda slots: slots[0].record(0, PartRecord(KEY, 0, 1, 4096, "", "", "xxh3_64", {}))
    ),
    "that a slot is whole": in_slots(lambda slots: slots[0].complete(MANIFEST)),
    "that a slot is stored": in_slots(lambda slots: slots[0].store(KEY)),
    "that a slot was verified": in_slots(lambda slots: leave_mark(slots[0], b"mark")),
    "what a restore reads": in_cache(lambda cache: cache.reserve([Chunk(0, 0, 4096, "0")], MANIFEST)),
    "what ranks of a restore tell": in_cache(lambda cache: cache.leave("needs", b"1")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_full_memory_is_named_with_what_makes_it_more(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slots.create(tmp_path / "memory", 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    said = (
        rf"{re.escape(str(tmp_path))}\S* has \d+ of \d+ bytes.* left, .* enlarge it \(.*checkpoint.memory.*sizeLimit.*"
    )
    with pytest.raises(OSError, match=said + r"name another memory: MemoryOptions\(directory=") as raised:
        write(tmp_path / "memory")
    assert raised.value.errno == errno.ENOSPC


def test_a_file_that_found_no_room_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"before")

    def half(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:1])
        full()

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="enlarge it"):
        replace_file(tmp_path / "file", b"after")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"before")]
