"""A copy is the same checkpoint, or none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates, read_index, verify_checkpoint
from everstep.checkpoint.catalog.verification import list_unverified_nodes, verify_and_mark
from everstep.checkpoint.errors import CheckpointError, Damaged, WriterConflict
from everstep.checkpoint.format.keys import HINT
from everstep.checkpoint.publish.copying import CopyOutcome, copy_checkpoint
from everstep.checkpoint.store.base import Store, open_store
from tests.checkpoint.builders import Training, is_good, key, load
from tests.checkpoint.crash import Point
from tests.checkpoint.processes import Process
from tests.checkpoint.system_calls import Calls

TRAINING = Training()


def test_a_copy_is_the_same_checkpoint(store: Store, tmp_path: Path) -> None:
    source = open_store(tmp_path / "source")
    TRAINING.save(source, key(5))
    seen: list[int] = []
    assert copy_checkpoint(source, store, key(5), on_bytes=seen.append) is CopyOutcome.COPIED
    assert verify_checkpoint(store, key(5)) == verify_checkpoint(source, key(5))
    assert is_good(TRAINING, load(store))
    for rank in range(2):
        assert store.read(key(5).part_name(rank)) == source.read(key(5).part_name(rank))
    assert sum(seen) > 0
    assert copy_checkpoint(source, store, key(5)) is CopyOutcome.PRESENT


def test_a_damaged_checkpoint_is_not_copied(store: Store, tmp_path: Path) -> None:
    source = open_store(tmp_path / "source")
    TRAINING.save(source, key(5))
    part = tmp_path / "source" / key(5).part_name(1)
    data = bytearray(part.read_bytes())
    data[-100] ^= 1
    part.write_bytes(data)
    with pytest.raises(Damaged):
        copy_checkpoint(source, store, key(5))
    assert list_candidates(store) == []
    part.write_bytes(bytes(data[:-100]) + bytes([data[-100] ^ 1]) + bytes(data[-99:]))
    assert copy_checkpoint(source, store, key(5)) is CopyOutcome.COPIED
    assert is_good(TRAINING, load(store))


@pytest.mark.parametrize("what", ["bytes", "part", "node manifest"])
def test_a_copy_that_was_damaged_is_made_whole(store: Store, tmp_path: Path, what: str) -> None:
    source = open_store(tmp_path / "source")
    manifest = TRAINING.save(source, key(5))
    copy_checkpoint(source, store, key(5))
    verify_and_mark(store, key(5))
    part, node = manifest.parts[1].name, read_index(source, key(5)).nodes[1].name
    if what == "bytes":
        store.replace(part, store.read(part)[:-1] + b"?")
    else:
        store.delete([part if what == "part" else node])
    assert copy_checkpoint(source, store, key(5)) is CopyOutcome.REPAIRED
    assert is_good(TRAINING, load(store))
    assert list_unverified_nodes(store, read_index(store, key(5))) == [0, 1], "what is there now was not read back yet"
    source.delete([part])
    assert copy_checkpoint(source, store, key(5)) is CopyOutcome.PRESENT, "a copy is good whatever became of its source"


def test_another_checkpoint_of_the_same_name_is_left_alone(store: Store, tmp_path: Path) -> None:
    source = open_store(tmp_path / "source")
    TRAINING.save(source, key(5))
    Training(rows=8).save(store, key(5))
    with pytest.raises(WriterConflict):
        copy_checkpoint(source, store, key(5))
    assert is_good(Training(rows=8), load(store))


def copies(answer: Callable[[Any], None], source: Path, target: Path, point: Point | None, number: int) -> None:
    """A copy in a process of its own, which gets the signal at a point of its calls in the target."""
    calls = Calls(target, point, number)
    with suppress(CheckpointError):
        copy_checkpoint(open_store(source), open_store(target), key(5))
    answer(calls.seen)


def whole(target: Path) -> bool:
    """Tell whether there is a checkpoint, and verify the data of each one."""
    store = open_store(target)
    for each in list_candidates(store):
        verify_checkpoint(store, each)
    return bool(list_candidates(store))


@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "killed"])
def test_two_copies_of_one_checkpoint_into_one_place_leave_it_whole(tmp_path: Path, killed: bool) -> None:
    source = tmp_path / "source"
    TRAINING.save(open_store(source), key(5))
    (tmp_path / "alone").mkdir()
    steps = len(Process(copies, source, tmp_path / "alone", None, 0).calls())
    for number in range(0, steps, 3 if killed else 1):
        target = tmp_path / f"target-{number}"
        target.mkdir()
        first = Process(copies, source, target, Point(number, after=False), signal.SIGSTOP)
        assert first.stops()
        Process(copies, source, target, None, 0).calls()
        assert whole(target), f"after the second one, while the first stands before its call {number}"
        if killed:
            first.kill()
        else:
            os.kill(first.pid, signal.SIGCONT)
            first.calls()
        assert whole(target), f"after both, the first of which stood before its call {number}"


def test_of_two_checkpoints_of_one_key_only_one_is_copied(tmp_path: Path) -> None:
    for name, rows in (("one", 40), ("other", 8)):
        Training(rows=rows).save(open_store(tmp_path / name), key(5))
    (tmp_path / "alone").mkdir()
    steps = len(Process(copies, tmp_path / "one", tmp_path / "alone", None, 0).calls())
    for number in range(0, steps, 3):
        target = tmp_path / f"target-{number}"
        target.mkdir()
        first = Process(copies, tmp_path / "one", target, Point(number, after=False), signal.SIGSTOP)
        assert first.stops()
        Process(copies, tmp_path / "other", target, None, 0).calls()
        os.kill(first.pid, signal.SIGCONT)
        first.calls()
        assert whole(target), f"the first stood before its call {number}"


def test_the_hint_only_moves_forward(store: Store, tmp_path: Path) -> None:
    source = open_store(tmp_path / "source")
    for step in (5, 6):
        TRAINING.save(source, key(step))
    for step in (6, 5):
        copy_checkpoint(source, store, key(step))
    assert store.read(HINT).decode() == key(6).manifest_name
