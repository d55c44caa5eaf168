"""The leader tells of checkpoints what its ranks say."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.agent.leader.checkpoint_meter import CheckpointMeter
from everstep.agent.wire.protocol import RankProgress
from everstep.agent.wire.rank_checkpoint import RankCheckpoint

from .bench import Bench, running


def says(rank: int = 0, **words: Any) -> RankProgress:
    return RankProgress(rank, checkpoint=RankCheckpoint(**words))


def restored(meter: CheckpointMeter) -> dict[str, Any]:
    told = meter.to_json()
    assert told is not None
    return dict(told["restored"])


def test_nothing_is_said_of_a_job_that_saves_nothing() -> None:
    meter = CheckpointMeter()
    assert not meter.update(1.0, (1, 1), [RankProgress(0, 5)])
    assert meter.to_json() is None


def test_the_newest_checkpoint_has_its_size_and_time() -> None:
    meter = CheckpointMeter()
    meter.update(7.0, (1, 1), [says(checkpoint=50, checkpoint_bytes=99, stall_ms=12, checkpoints_failed=0)])
    meter.update(9.0, (1, 1), [says(checkpoint=50, checkpoint_bytes=99, stall_ms=12, checkpoints_failed=0)])
    told = meter.to_json()
    assert told == {
        "step": 50, "bytes": 99, "stallSeconds": 0.012, "at": 7.0, "failedSaves": 0, "every": None,
        "trainedStep": None, "stepsPerSecond": None, "restored": None,
    }  # fmt: skip


def test_lost_steps_are_those_between_the_last_step_and_the_restore() -> None:
    meter = CheckpointMeter()
    meter.restart(None)
    meter.update(1.0, (1, 1), [says(restored=0)])
    assert restored(meter)["lostSteps"] is None
    meter.restart(57)
    meter.update(2.0, (1, 2), [says(restored=50, restored_from="memory", restored_ms=310, restored_over=1)])
    assert restored(meter) == {
        "id": "1.2", "step": 50, "tier": "memory", "seconds": 0.31, "passedOver": 1, "lostSteps": 7,
    }  # fmt: skip


def test_lost_steps_are_counted_as_checkpoints_are_where_ranks_tell_that() -> None:
    """A script may report no progress, or that of its batches."""
    meter = CheckpointMeter()
    meter.update(1.0, (1, 1), [says(restored=0, trained_step=7)])
    meter.update(26.0, (1, 1), [says(restored=0, trained_step=57)])
    told = meter.to_json()
    assert told is not None
    assert (told["trainedStep"], told["stepsPerSecond"], meter.find_trained_step(228)) == (57, 2.0, 57)
    meter.restart(228)
    assert meter.find_trained_step(None) is None, "the next generation has not trained yet"
    meter.update(2.0, (1, 2), [says(restored=50)])
    assert restored(meter)["lostSteps"] == 7


@pytest.mark.parametrize(("progress", "at_the_save", "lost"), [(1000, 1000, 57), (20_000, 5, 57), (3, 5000, 0)])
def test_steps_that_are_lost_of_a_script_that_saves_by_itself_are_those_since_its_save(
    progress: int, at_the_save: int, lost: int
) -> None:
    """It saves after each epoch, say, and reports its batches: only at a save both numbers are of one moment."""
    meter = CheckpointMeter()

    def trains(generation: int, step: int, **words: Any) -> None:
        told = RankCheckpoint(restored=0, takes_requests=0, **words)
        meter.update(float(step), (1, generation), [RankProgress(0, step, checkpoint=told)])

    told: dict[str, Any] = {"trained_step": at_the_save, "progress_step": progress}
    trains(1, progress + lost // 2, **told)  # in one heartbeat
    trains(1, progress + lost, checkpoint=at_the_save, **told)
    meter.restart(progress + lost)
    said = RankCheckpoint(restored=at_the_save, takes_requests=0)
    meter.update(9.0, (1, 2), [RankProgress(0, progress, checkpoint=said)])
    assert restored(meter)["lostSteps"] == lost
    meter.restart(progress + 7)  # before it saved anything
    meter.update(9.5, (1, 3), [RankProgress(0, progress, checkpoint=said)])
    assert restored(meter)["lostSteps"] == 7


def test_who_saves_by_itself_every_few_seconds_trains_at_the_pace_of_its_progress() -> None:
    """Its steps go back by the numbers of its checkpoints at each save; what they cost is told by the pace."""
    meter = CheckpointMeter()
    for second in range(2, 61, 2):
        epoch, step = second // 15, 20 * second
        saved: dict[str, Any] = {"trained_step": epoch, "progress_step": 300 * epoch} if epoch else {}
        said = RankCheckpoint(restored=0, save_every=0, takes_requests=0, **saved)
        meter.update(float(second), (1, 1), [RankProgress(0, step, checkpoint=said)])
        assert (meter.to_json() or {})["stepsPerSecond"] in (None, 20.0)
    assert (meter.to_json() or {})["stepsPerSecond"] == 20.0


def test_a_generation_that_fails_in_its_first_step_loses_no_more_than_that() -> None:
    """It has reported a batch, and none of the steps by which its checkpoints count."""
    meter = CheckpointMeter()
    told = RankCheckpoint(restored=0, trained_step=5000, takes_requests=1)
    meter.update(1.0, (1, 1), [RankProgress(0, 20_000, checkpoint=told)])
    for generation in (2, 3):
        meter.restart(20_000 if generation == 2 else 20_001)
        said = RankCheckpoint(restored=5000, takes_requests=0)
        meter.update(2.0, (1, generation), [RankProgress(0, 20_000, checkpoint=said)])
    assert restored(meter)["lostSteps"] == 1


def test_steps_are_lost_once_however_often_the_next_generation_fails() -> None:
    meter = CheckpointMeter()
    meter.restart(57)
    meter.update(2.0, (1, 2), [says(restored=50)])
    meter.restart(None)  # it made no step
    meter.update(3.0, (1, 3), [says(restored=50)])
    assert restored(meter)["lostSteps"] == 0


def test_steps_are_not_forgotten_when_a_generation_ends_before_it_restored() -> None:
    meter = CheckpointMeter()
    meter.restart(57)
    meter.restart(None)
    meter.update(3.0, (1, 3), [says(restored=50)])
    assert restored(meter)["lostSteps"] == 7


def test_steps_of_generations_that_end_before_they_tell_what_they_restored_are_lost_too() -> None:
    """A script that saves by itself tells it at its first save."""
    meter = CheckpointMeter()
    saved = RankCheckpoint(restored=0, trained_step=2, progress_step=200, takes_requests=0)
    meter.update(1.0, (1, 1), [RankProgress(0, 250, checkpoint=saved)])
    meter.restart(250)
    meter.update(2.0, (1, 2), [RankProgress(0, 280)])
    meter.restart(280)
    saved = RankCheckpoint(restored=2, trained_step=3, progress_step=300, takes_requests=0)
    meter.update(3.0, (1, 3), [RankProgress(0, 300, checkpoint=saved)])
    assert restored(meter)["lostSteps"] == 50 + 80
    meter.restart(310)
    meter.update(4.0, (1, 4), [RankProgress(0, 400, checkpoint=RankCheckpoint(restored=3, takes_requests=0))])
    assert restored(meter)["lostSteps"] == 10


def test_a_restored_checkpoint_keeps_the_size_that_is_known() -> None:
    meter = CheckpointMeter()
    meter.update(7.0, (1, 1), [says(checkpoint=50, checkpoint_bytes=99)])
    meter.restart(57)
    meter.update(9.0, (1, 2), [says(checkpoint=50, restored=50)])
    told = meter.to_json()
    assert told is not None
    assert (told["step"], told["bytes"], told["at"]) == (50, 99, 7.0)


def test_a_waiting_poll_is_answered_at_once_when_ranks_have_restored_or_a_save_failed() -> None:
    bench: Bench = running()
    bench.leader.take_heartbeat(bench.now, 1, 1, [RankProgress(0, 1)])  # from now on progress waits for a second
    for words in ({"restored": 50}, {"restored": 50, "checkpoints_failed": 1}):
        before = bench.leader.version
        bench.leader.take_heartbeat(bench.now, 1, 1, [says(**words)])
        assert bench.leader.version > before
    before = bench.leader.version
    bench.leader.take_heartbeat(bench.now, 1, 1, [says(restored=50, checkpoints_failed=1, checkpoint=60)])
    assert bench.leader.version == before, "some scripts save after each step"
    bench.later(1.0)
    assert bench.leader.version > before
    assert bench.leader.state()["checkpoint"]["step"] == 60


@pytest.mark.parametrize(
    ("name", "value"),
    [("checkpoint", "-1"), ("checkpoint", "1e3"), ("checkpoint", "9" * 17), ("restored_from", "disk"), ("loss", "1")],
)
def test_what_cannot_be_a_word_of_checkpoints_is_refused(name: str, value: str) -> None:
    assert RankCheckpoint().take(name, value) is None


@pytest.mark.parametrize("data", [None, 5, [], {"checkpoint": -1}, {"checkpoint": True}, {"restored_from": 7}])
def test_what_is_no_report_reads_as_none(data: Any) -> None:
    assert RankCheckpoint.from_json(data) is None


def test_a_report_comes_through_the_wire() -> None:
    sent = says(3, checkpoint=50, checkpoint_bytes=9, restored=40, restored_from="peer", restored_ms=12)
    assert RankProgress.from_json(sent.to_json()) == sent
