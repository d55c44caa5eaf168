"""The log of a run tells each of its events once, and not a line for each step of the same trouble."""

from __future__ import annotations

import logging
import time

import pytest

from everstep.checkpoint.events import CheckpointEvent, Events
from everstep.checkpoint.format.keys import Attempt, Key


def test_a_save_that_is_in_the_way_of_many_steps_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    events, told = Events(reports=False), list[CheckpointEvent]()
    events.on("stalled", told.append)

    def emit(step: int) -> None:
        events.emit(CheckpointEvent("stalled", Key(Attempt(0, 1), step), "is still being stored"))

    with caplog.at_level(logging.WARNING, "everstep.checkpoint"):
        for _ in range(1000):
            emit(7)
        assert len(caplog.records) == 1
        assert len(told) == 1000, "callbacks hear each"
        emit(8)
        assert len(caplog.records) == 2
        now += 61
        emit(8)
        assert len(caplog.records) == 3


def test_failures_are_logged_each(caplog: pytest.LogCaptureFixture) -> None:
    events = Events(reports=False)
    for _ in range(3):
        events.emit(CheckpointEvent("failed", Key(Attempt(0, 1), 7), "no room"))
    assert len(caplog.records) == 3
