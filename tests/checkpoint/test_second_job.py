"""A run goes on from what it restored only while that is the newest: nobody's steps are pushed out without a word."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch.distributed as dist

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.session.checkpointer import Checkpointer
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session, steps_in, train
from tests.checkpoint.writers import until

pytestmark = pytest.mark.torch


def go_on_when_told(rank: int, folder: Path, memory: str) -> tuple[int, str]:
    """The step that this job restores, and what its first step is answered when the other one has saved more."""
    model = Model()
    with session(folder, directory=folder / memory) as ckpt:
        restored = ckpt.restore(model=model)
        (folder / f"restored-{rank}").touch()
        until((folder / "go").exists, "the other job has saved", 200.0)
        try:
            train(ckpt, model, restored.step + 1)
        except CheckpointError as error:
            return restored.step, str(error)
    return restored.step, ""


@pytest.mark.parametrize("memory", ["memory", "memory-of-another-machine"])
def test_a_job_that_waited_for_another_does_not_go_on_from_before_what_that_has_saved(
    folder: Path, memory: str
) -> None:
    results: list[Any] = []
    model = Model()
    with session(folder) as first:
        first.track(model=model)
        train(first, model, 10)
        first.wait()
        second = threading.Thread(target=lambda: results.extend(run(2, go_on_when_told, folder, memory, timeout=200.0)))
        second.start()
        until(lambda: all((folder / f"restored-{rank}").exists() for rank in (0, 1)), "the second job restores", 200.0)
        train(first, model, 20)
        first.wait()
        (folder / "go").touch()
    second.join()
    for step, said in results:
        assert step == 10
        assert "step 10 (attempt 0000000000.0000000001) was restored and was the newest" in said
        assert "step 20 (attempt 0000000000.0000000001) was saved" in said
        assert "Start this run again" in said
    assert steps_in(folder) == [10, 20]
    with session(folder, directory=folder / memory) as again:  # what was refused holds nothing
        assert again.restore(model=model).step == 20
        train(again, model, 30)


def save_elsewhere(folder: Path, until_step: int, **options: Any) -> None:
    model = Model()
    with session(folder, directory=folder / "memory-elsewhere", **options) as ckpt:
        ckpt.restore(model=model)
        train(ckpt, model, until_step)


def test_a_run_that_found_an_empty_store_does_not_begin_where_another_has_begun_since(folder: Path) -> None:
    with session(folder) as ckpt:
        ckpt.track(model=Model())
        save_elsewhere(folder, 10)
        with pytest.raises(CheckpointError, match="there was no checkpoint when this session began, and step 10"):
            ckpt.step(1)


def from_an_older_step(ckpt: Checkpointer, model: Model, folder: Path) -> None:
    assert ckpt.restore(model=model, step=10).step == 10


def from_the_start(ckpt: Checkpointer, model: Model, folder: Path) -> None:
    ckpt.restore(model=model)
    model.at = 0
    ckpt.start_over(model=model)
    save_elsewhere(folder, 40)


@pytest.mark.parametrize("goes_on", [from_an_older_step, from_the_start])
def test_who_means_to_leave_newer_steps_behind_may(folder: Path, goes_on: Any) -> None:
    save_elsewhere(folder, 30)
    model = Model()
    with session(folder) as ckpt:
        goes_on(ckpt, model, folder)
        train(ckpt, model, model.at + 5)
        ckpt.save(model.at)
    assert session_restores(folder) == model.at


def session_restores(folder: Path) -> int:
    with session(folder, directory=folder / "memory-of-a-reader") as reader:
        return reader.restore(model=Model()).step


def test_an_earlier_incarnation_of_the_same_job_that_still_saves_keeps_nobody_from_going_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EVERSTEP_JOB", "digits")
    save_elsewhere(folder, 10, attempt=(1, 1))
    model = Model()
    with session(folder, attempt=(1, 2)) as ckpt:
        ckpt.restore(model=model)
        save_elsewhere(folder, 20, attempt=(1, 1))
        train(ckpt, model, 11)
        ckpt.save(11)
    assert "by an earlier attempt of this job, which is over" in caplog.text
    assert session_restores(folder) == 11


def train_and_be_killed(rank: int, folder: Path, steps: int) -> None:
    """Every step is saved, and all ranks are killed when the last one is copied: its writer is left with it."""
    model = Model()
    ckpt = session(folder, every_steps=1, policy="queue")
    restored = ckpt.restore(model=model)
    assert restored.step == (steps - 5 if steps > 5 else 0)
    train(ckpt, model, steps)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_is_started_right_after_it_was_killed_is_never_refused_and_loses_no_step(folder: Path) -> None:
    for steps in (5, 10, 15):
        run(2, train_and_be_killed, folder, steps, dies=[0, 1])
