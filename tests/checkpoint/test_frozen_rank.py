"""Rank 0, which holds the key-value store, is stopped: the others name it after the session's timeout."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from everstep.checkpoint.errors import CheckpointError
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session
from tests.checkpoint.writers import until
from tests.long_sweeps import only_in_long_sweeps

pytestmark = pytest.mark.torch


def stops_before(rank: int, folder: Path, call: str) -> str:
    """Rank 0 goes on when the others have told, so that no process stays stopped."""
    told = folder / "told"
    if rank == 0 and os.fork() == 0:  # it wakes its parent
        until(lambda: told.exists() or os.getppid() == 1, "the others tell", 90.0)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)

    def reach(here: str) -> None:
        if rank == 0 and here == call:
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        reach("checkpointer")
        with session(folder, timeout=10.0) as ckpt:
            reach("track")
            ckpt.track(model=Model())
            reach("save")
            ckpt.save(1)
            ckpt.wait()
            reach("second save")
            ckpt.save(2)
    except CheckpointError as error:
        return str(error)
    finally:
        if rank != 0:
            told.touch()
    return ""


@pytest.mark.parametrize("call", ["checkpointer", "second save", *only_in_long_sweeps("track", "save")])
def test_rank_0_that_is_stopped_is_named_by_the_others(call: str, folder: Path) -> None:
    """Before, they waited for ever where they asked its store for something."""
    _, told = run(2, stops_before, folder, call)
    assert "rank 0" in told
    assert "cannot be reached" in told or "left before" in told


def makes_a_session_alone(rank: int, folder: Path) -> str:
    if rank == 1:
        until((folder / "told").exists, "the other has told", 60.0)
        return ""
    try:
        session(folder, timeout=3.0)
    except CheckpointError as error:
        return str(error)
    finally:
        (folder / "told").touch()
    return ""


def test_a_rank_that_makes_no_session_is_named_by_the_others(folder: Path) -> None:
    """Before, the error was torch's, and spoke of keys of its own."""
    told, _ = run(2, makes_a_session_alone, folder)
    assert "rank 1 left before everstep.checkpointer(), or did not come to it in time" in told
