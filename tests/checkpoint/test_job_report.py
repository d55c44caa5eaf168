"""The status of an everstep job hears what becomes of saves, by the words of its ranks' progress."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep
from everstep.agent.ranks.progress import ProgressUpdate
from everstep.agent.wire.rank_checkpoint import RankCheckpoint
from everstep.checkpoint.events import CheckpointEvent, Events
from everstep.checkpoint.format.keys import Attempt, Key


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end of a FIFO from which an agent would read."""
    path = tmp_path / "progress"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv("EVERSTEP_PROGRESS", str(path))
    yield reader
    os.close(reader)


def heard(agent: int) -> RankCheckpoint | None:
    update = ProgressUpdate()
    for line in os.read(agent, 1 << 16).decode().splitlines():
        assert update.take(line), line
    return update.checkpoint


def key(step: int) -> Key:
    return Key(Attempt(1, 2), step)


def test_a_save_is_told_with_its_size(agent: int) -> None:
    Events().emit(CheckpointEvent("saved", key(50), "", {"bytes": 99, "seconds": 0.5}))
    assert heard(agent) == RankCheckpoint(checkpoint=50, checkpoint_bytes=99, checkpoints_failed=0, takes_requests=0)


def test_a_save_is_told_with_how_long_it_held_up_training(agent: int) -> None:
    Events().emit(CheckpointEvent("saved", key(50), "", {"bytes": 99, "stall_seconds": 0.012}))
    told = heard(agent)
    assert told is not None
    assert told.stall_ms == 12


def test_failed_saves_are_counted_until_one_is_stored(agent: int) -> None:
    events = Events()
    events.emit(CheckpointEvent("failed", key(60), "the store is full"))
    events.emit(CheckpointEvent("failed", key(70), "the store is full"))
    assert heard(agent) == RankCheckpoint(checkpoints_failed=2, takes_requests=0)
    events.emit(CheckpointEvent("saved", key(80)))
    assert heard(agent) == RankCheckpoint(checkpoint=80, checkpoints_failed=0, takes_requests=0)


def test_a_restore_is_told_with_its_place_and_what_was_passed_over(agent: int) -> None:
    events = Events()
    events.emit(CheckpointEvent("fell_back", key(90), "sums differ"))
    events.emit(CheckpointEvent("restored", key(50), "", {"tier": "memory", "bytes": 9, "seconds": 0.3123}))
    assert heard(agent) == RankCheckpoint(
        checkpoint=50,
        restored=50,
        restored_from="memory",
        restored_ms=312,
        restored_over=1,
        save_every=0,
        takes_requests=0,
    )


@pytest.mark.parametrize("again", ["progress", "save"])
def test_what_a_full_pipe_has_no_room_for_is_told_by_the_next_call(agent: int, again: str) -> None:
    """The last save of a run may be long ago when the agent reads again, and nothing else tells of it."""
    events = Events()
    everstep.progress(1)
    filler = os.open(os.environ["EVERSTEP_PROGRESS"], os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filler, b"step=2\n")
    os.close(filler)
    events.emit(CheckpointEvent("saved", key(50), "", {"bytes": 99}))
    events.emit(CheckpointEvent("failed", key(60), "the store is full"))
    os.read(agent, 1 << 20)
    if again == "progress":
        everstep.progress(3)
        assert heard(agent) == RankCheckpoint(50, 99, checkpoints_failed=1, takes_requests=0)
    else:
        events.emit(CheckpointEvent("saved", key(70), "", {"bytes": 98}))
        assert heard(agent) == RankCheckpoint(70, 98, checkpoints_failed=0, takes_requests=0)
    everstep.progress(4)
    assert os.read(agent, 1 << 16) == b"step=4 phase=train\n", "it is told once"


def test_one_rank_of_a_run_tells_it(agent: int) -> None:
    Events(reports=False).emit(CheckpointEvent("saved", key(50)))
    Events().tell_restored(None, {}, {})
    assert heard(agent) == RankCheckpoint(restored=0, save_every=0, takes_requests=0)


def test_a_session_that_looks_for_requests_says_so_and_how_far_it_is(agent: int) -> None:
    events = Events(trains=False, every=600.0)
    events.tell_restored(None, {}, {})
    events.begin_training()
    events.tell_step(1)
    events.tell_step(2)
    assert heard(agent) == RankCheckpoint(restored=0, save_every=600, trained_step=2, takes_requests=1)
    events.emit(CheckpointEvent("saved", key(2)))
    assert heard(agent) == RankCheckpoint(checkpoint=2, checkpoints_failed=0, takes_requests=1)


def test_who_saves_by_itself_says_how_far_it_is_at_each_save(agent: int) -> None:
    events = Events(trains=False, every=600.0)
    everstep.progress(5300)
    events.tell_restored(None, {}, {})
    events.tell_saved_step(5)
    events.begin_training()
    told = RankCheckpoint(restored=0, save_every=0, trained_step=5, progress_step=5300, takes_requests=0)
    assert heard(agent) == told, "no save is overdue because none comes every ten minutes"
    events.tell_step(6)
    events.tell_step(7)
    assert heard(agent) == RankCheckpoint(save_every=600, trained_step=7, takes_requests=1)


def test_a_session_that_saves_by_itself_beside_one_that_looks_for_requests_takes_none_from_it(agent: int) -> None:
    """The best model, say, is saved at each evaluation in a store of its own."""
    trainer, best = Events(), Events()
    trainer.tell_step(900)
    best.tell_saved_step(9)
    best.emit(CheckpointEvent("saved", key(8)))
    told = heard(agent)
    assert told is not None
    assert (told.trained_step, told.takes_requests) == (900, 1)


def test_a_session_that_has_ended_looks_for_requests_no_more(agent: int) -> None:
    """An evaluation that follows hears of a stop at once: nobody would make the save that it waits for."""
    first, second = Events(), Events()
    first.tell_step(900)
    second.tell_step(900)
    second.end_training()
    second.end_training()
    assert heard(agent) == RankCheckpoint(save_every=0, trained_step=900, takes_requests=1)
    first.end_training()
    assert heard(agent) == RankCheckpoint(takes_requests=0)


def test_without_an_agent_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EVERSTEP_PROGRESS", raising=False)
    Events().emit(CheckpointEvent("saved", key(50)))
    monkeypatch.setenv("EVERSTEP_PROGRESS", str(tmp_path / "gone"))
    Events().emit(CheckpointEvent("saved", key(50)))


def test_what_only_reads_tells_nothing_of_its_steps(agent: int) -> None:
    """A run reads the checkpoints of others, as of a teacher, or a process of it evaluates."""
    reader, trainer = Events(trains=False), Events(trains=False)
    trainer.tell_restored(None, {}, {})
    reader.emit(CheckpointEvent("restored", key(100_000), "", {"tier": "store", "seconds": 9.0}))
    trainer.begin_training()
    assert heard(agent) == RankCheckpoint(restored=0, save_every=0, takes_requests=0)
    trainer.emit(CheckpointEvent("restored", key(7)))
    assert heard(agent) == RankCheckpoint(checkpoint=7, restored=7, restored_over=0, save_every=0, takes_requests=0)
