"""Saves that are asked for: at the next boundary of a step, and by a deadline."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from everstep.checkpoint.events import CheckpointEvent
from everstep.checkpoint.session.checkpointer import SaveFailed
from everstep.checkpoint.writer import control
from tests.checkpoint.sessions import Model, claim, session, steps_in, train

pytestmark = pytest.mark.torch


def test_a_save_that_is_asked_for_comes_at_the_next_boundary(folder: Path) -> None:
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 5)
        signal.signal(signal.SIGUSR1, lambda *_: ckpt.request(deadline=60))
        os.kill(os.getpid(), signal.SIGUSR1)
        train(ckpt, model, 200, pause=0.001)
    assert len(steps_in(folder)) == 1
    assert 5 < steps_in(folder)[0] < 200


def test_a_deadline_that_cannot_be_met_is_told_beforehand(folder: Path) -> None:
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        first = ckpt.save(1, deadline=60)
        assert first.saves
        assert first.seconds is None  # nothing was measured yet
        ckpt.wait()
        refused = ckpt.save(2, deadline=1e-9)
        assert not refused.saves
        assert refused.seconds is not None
        assert ckpt.save(3, deadline=60).saves
    assert steps_in(folder) == [1, 3]


def test_a_save_that_is_asked_for_and_cannot_be_there_in_time_is_not_begun(folder: Path) -> None:
    model = Model()
    told: list[CheckpointEvent] = []
    with session(folder, every="1h") as ckpt:
        ckpt.on("stalled", told.append)
        ckpt.track(model=model)
        ckpt.save(1)
        ckpt.wait()
        model.at = 1
        ckpt.request(deadline=1e-9)
        train(ckpt, model, 50)
    assert steps_in(folder) == [1]
    assert ["asked for cannot be stored" in event.why for event in told] == [True]


def test_a_save_that_is_asked_for_waits_for_an_earlier_one_while_training_goes_on(folder: Path) -> None:
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        node = claim(ckpt)
        link = control.WriterLink.connect(folder / "memory")
        tell = node.tell

        def stopped(verb: str, **fields: Any) -> int:
            if verb == "filled":
                os.kill(link.pid, signal.SIGSTOP)
                node.tell = tell  # type: ignore[method-assign]
            return tell(verb, **fields)

        node.tell = stopped  # type: ignore[method-assign]
        ckpt.save(1)
        model.at = 1
        ckpt.request(deadline=60)
        began = time.monotonic()
        train(ckpt, model, 50)
        assert time.monotonic() - began < 10
        os.kill(link.pid, signal.SIGCONT)
        link.close()
        ckpt.wait()
        train(ckpt, model, 100)
    assert steps_in(folder)[0] == 1
    assert len(steps_in(folder)) == 2


@pytest.mark.parametrize("steps", [0, 30], ids=["before the first step", "after the last"])
def test_a_save_that_is_asked_for_and_meets_no_boundary_is_told_at_the_end(folder: Path, steps: int) -> None:
    model = Model()
    told: list[str] = []
    ckpt = session(folder, every="1h")
    ckpt.on("failed", lambda event: told.append(event.why))
    ckpt.track(model=model)
    train(ckpt, model, steps)
    ckpt.request()
    with pytest.raises(SaveFailed, match=r"asked for by request\(\), and no step\(\).*call save\(step\)"):
        ckpt.close()
    assert len(told) == 1
    assert steps_in(folder) == []


def test_a_save_by_hand_after_it_was_asked_for_is_what_was_asked_for(folder: Path) -> None:
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 30)
        ckpt.request()
        ckpt.save(30)
    assert steps_in(folder) == [30]
