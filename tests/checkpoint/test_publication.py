"""Several processes publish the same step of the same attempt: what is committed is all of one of them, and is good."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.errors import CheckpointError, WriterConflict
from everstep.checkpoint.publish import folder
from everstep.checkpoint.publish.publication import find_writer
from everstep.checkpoint.store.base import open_store
from tests.checkpoint.builders import key
from tests.checkpoint.crash import Point
from tests.checkpoint.processes import Process
from tests.checkpoint.system_calls import Calls


def folders(root: Path) -> list[Path]:
    """Three with other content each, all of the same size."""
    found = []
    for name in ("one", "two", "three"):
        (root / name).mkdir(parents=True)
        (root / name / "model").write_text(name.ljust(6) * 1000)
        found.append(root / name)
    return found


def publishes(answer: Callable[[Any], None], source: Path, store: Path, point: Point | None, number: int) -> None:
    """A publisher in a process of its own, which gets the signal at a point of its calls in the store."""
    calls = Calls(store, point, number)
    try:
        folder.save_folder(open_store(store), key(5), source)
        said = "saved"
    except CheckpointError as error:
        said = str(error)
    answer([("said", said), *calls.seen])


def read_committed(store: Path, into: Path) -> str:
    """Whose content is committed; "" where nothing is. It is good."""
    found = open_store(store)
    for each in list_candidates(found):
        verify_checkpoint(found, each)
        folder.restore_folder(found, into, step=each, replace=True)
        return (into / "model").read_text()[:6].strip()
    return ""


@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "killed"])
def test_what_several_publish_as_one_step_is_all_of_one_and_says_whose(tmp_path: Path, killed: bool) -> None:
    one, two, three = folders(tmp_path)
    (tmp_path / "alone").mkdir()
    steps = len(Process(publishes, one, tmp_path / "alone", None, 0).calls()) - 1
    for number in range(0, steps, 2 if killed else 1):
        store = tmp_path / f"store-{number}"
        store.mkdir()
        first = Process(publishes, one, store, Point(number, after=False), signal.SIGSTOP)
        assert first.stops()
        second = Process(publishes, two, store, None, 0)
        said = {"two": second.calls()[0][1]}
        where = f"the first stood before its call {number}"
        between = read_committed(store, tmp_path / "back")
        assert between in ("one", "two"), where
        if number % 3 == 0:
            said["three"] = Process(publishes, three, store, None, 0).calls()[0][1]
        if killed:
            first.kill()
        else:
            os.kill(first.pid, signal.SIGCONT)
            said["one"] = first.calls()[0][1]
        after = read_committed(store, tmp_path / "back")
        assert after == between, where
        told = {name for name, words in said.items() if words == "saved"}
        assert told == {after} & said.keys(), f"{where}: {said}"
        if after == "two":
            others = {words for name, words in said.items() if name != "two"}
            assert all(f"is already committed by process {second.pid} on " in words for words in others), others


def test_the_same_process_may_try_again_and_again_and_leaves_one_part(tmp_path: Path) -> None:
    (one, *_), store = folders(tmp_path), open_store(tmp_path / "store")

    def refuse() -> str:
        return "not now"

    for _ in range(3):
        with pytest.raises(CheckpointError, match="not now"):
            folder.save_folder(store, key(5), one, fenced=refuse)
    folder.save_folder(store, key(5), one)
    assert len([entry for entry in store.list(key(5).data_prefix) if entry.name.endswith(".part")]) == 1
    assert find_writer(store, key(5)).startswith(f"process {os.getpid()} on ")
    with pytest.raises(WriterConflict, match=f"is already committed by process {os.getpid()} on "):
        folder.save_folder(store, key(5), one)
