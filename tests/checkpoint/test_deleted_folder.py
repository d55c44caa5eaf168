"""The working directory of a process was deleted: absolute paths work, relative ones are refused on all ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import everstep
from everstep.checkpoint.errors import CheckpointError
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session, steps_in

pytestmark = pytest.mark.torch


def go_where_nothing_is(folder: Path) -> None:
    gone = folder / f"gone-{os.getpid()}"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()


def save_absolute(rank: int, folder: Path) -> None:
    go_where_nothing_is(folder)
    with session(folder) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)


def test_absolute_paths_work(folder: Path) -> None:
    run(2, save_absolute, folder)
    assert steps_in(folder) == [1]


def open_relative(rank: int, folder: Path, store: str, memory: str | None, from_environment: bool) -> str:
    """Only rank 1 is where nothing is; rank 0 does not wait for it until its timeout, which is an hour."""
    os.chdir(folder)
    if rank == 1:
        go_where_nothing_is(folder)
    if memory is not None and from_environment:
        os.environ["EVERSTEP_CHECKPOINT_MEMORY"] = memory
    with pytest.raises(CheckpointError) as raised:
        everstep.checkpointer(
            store,
            memory=everstep.MemoryOptions(directory=None if from_environment else memory),
            times=everstep.TimeOptions(timeout=3600.0),
        )
    return str(raised.value)


@pytest.mark.parametrize(
    ("store", "memory", "from_environment", "named"),
    [
        ("store", None, False, "the store store"),
        ("{folder}/store", "memory", False, "MemoryOptions.directory memory"),
        ("{folder}/store", "memory", True, "the memory for checkpoints memory"),
    ],
)
def test_relative_paths_are_refused_on_all_ranks_by_name(
    store: str, memory: str | None, from_environment: bool, named: str, folder: Path
) -> None:
    first, second = run(2, open_relative, folder, store.format(folder=folder), memory, from_environment)
    assert first == f"rank 1: {second}"
    assert f"{named} is relative to the working directory of process" in second
    assert "give an absolute path" in second
