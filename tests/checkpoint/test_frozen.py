"""A writer of an old attempt that freezes anywhere and thaws after a new attempt has saved: it changes nothing."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.format.keys import HINT
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.builders import Training, is_good, key, load
from tests.checkpoint.crash import Point, count_calls, everything, frozen, in_memory, node_task

training = Training(rows=40, chunk=1024)
OLD, NEW = key(20, generation=1), key(15, generation=2)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as found:
        yield found


def test_a_frozen_writer_is_never_chosen_and_overwrites_nothing(folder: Path) -> None:
    """Stopped before every call of node 0, of its part as of its commit."""
    base, trial = folder / "base", folder / "trial"
    store = PosixStore(base)
    training.save(store, key(10))
    training.write(store, OLD, 1)
    shutil.copytree(base, trial)
    trace = count_calls(trial, node_task, training, OLD, 0)
    thawed_and_committed = 0
    for number in range(len(trace)):
        shutil.rmtree(trial)
        shutil.copytree(base, trial)
        store = PosixStore(trial)
        old = frozen(trial, node_task, training, OLD, 0, Point(number, after=False))
        assert old.pid is not None
        training.save(store, NEW)
        before = finished(trial)
        os.kill(old.pid, signal.SIGCONT)
        old.join(30)
        assert old.exitcode == 0
        after = finished(trial)
        assert {name: after.get(name) for name in before} == before
        assert list_candidates(store)[0] == NEW
        loaded = load(store)
        assert loaded.key == NEW
        assert is_good(training, loaded)
        thawed_and_committed += OLD in list_candidates(store)
    assert thawed_and_committed == len(trace)  # it did go on, each time


def finished(folder: Path) -> dict[str, bytes]:
    """All files but those that the frozen writer itself is writing, and the hint, which nobody believes."""

    def own(name: str) -> bool:
        return name == HINT or name.startswith(OLD.data_prefix) or name.rpartition("/")[2].startswith(".new-")

    return {name: data for name, data in everything(folder).items() if not own(name)}
