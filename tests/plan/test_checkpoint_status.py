"""The status tells the newest checkpoint and what each generation began from; events tell what went wrong."""

from __future__ import annotations

import json

import pytest

from everstep_operator.api.status import CheckpointStatus, ConditionType, TrainingProgress
from everstep_operator.plan.checkpoint_status import MAX_STEPS
from everstep_operator.plan.leader_view import ReportedCheckpoint, ReportedRestore
from tests.builders import JobBuilder, job
from tests.plan.world import START, World

MIB = 1 << 20


def saves(**policy: object) -> World:
    return World(job().spec(checkpoint={"store": "s3://bucket/run", **policy}).build()).run("Running")


def known(world: World) -> CheckpointStatus:
    assert world.status.checkpoint is not None
    return world.status.checkpoint


def said(world: World) -> list[tuple[str, str]]:
    return [(event.reason, event.message) for event in world.events]


def test_a_job_that_saves_nothing_has_no_checkpoint() -> None:
    world = World(job().build()).run("Running")
    assert world.status.checkpoint is None
    world.now += 7200
    world.reconcile()
    assert world.status.condition(ConditionType.CHECKPOINT_STALE) is None


def test_the_newest_checkpoint_is_written_with_the_next_progress() -> None:
    world = saves()
    world.reported = ReportedCheckpoint(step=50, bytes=3 * MIB, at=START + 60)
    world.reconcile()
    assert (known(world).step, known(world).bytes) == (50, 3 * MIB), "the first one at once"
    world.reported = ReportedCheckpoint(step=60, bytes=4 * MIB, at=START + 70)
    world.tick(1)
    world.reconcile()
    assert known(world).step == 50, "that one more was saved can wait"
    world.now += 31
    world.reconcile()
    assert (known(world).step, known(world).bytes) == (60, 4 * MIB)
    assert known(world).time is not None


def test_what_a_generation_began_from_is_told_at_once_and_once() -> None:
    world = saves()
    restored = ReportedRestore("1.2", 50, "memory", 0.31, 0, 7)
    world.reported = ReportedCheckpoint(step=50, restored=restored)
    world.reconcile()
    found = known(world).restored
    assert found is not None
    assert (found.tier, found.lost_steps, known(world).lost_steps) == ("memory", 7, 7)
    told = ("Restored", "training continues from step 50 from the nodes' memory in 0.31 s; 7 steps are trained again")
    assert told in said(world)
    world.events.clear()
    world.now += 31
    world.reconcile()
    assert known(world).lost_steps == 7
    assert said(world) == []


def test_lost_steps_add_up_over_generations() -> None:
    world = saves()
    world.reported = ReportedCheckpoint(step=50, restored=ReportedRestore("1.2", 50, lost_steps=7))
    world.reconcile()
    world.reported = ReportedCheckpoint(step=80, restored=ReportedRestore("1.3", 80, lost_steps=2))
    world.reconcile()
    assert known(world).lost_steps == 9


def test_a_new_leader_that_does_not_know_the_last_step_is_helped_by_the_status() -> None:
    world = saves()
    world.train(500)
    world.now += 31
    world.reconcile()
    world.reported = ReportedCheckpoint(step=480, restored=ReportedRestore("1.2", 480, lost_steps=None))
    world.reconcile()
    assert known(world).lost_steps == 20


def test_lost_steps_and_their_time_are_counted_as_checkpoints_are() -> None:
    """Progress may count batches, of which there are four to a step here."""
    world = saves()
    world.train(2000)
    world.reported = ReportedCheckpoint(step=450, trained_step=500, steps_per_second=0.25)
    world.now += 1000
    world.reconcile()
    world.reported = ReportedCheckpoint(step=450, restored=ReportedRestore("1.2", 450, lost_steps=None))
    world.reconcile()
    assert known(world).lost_steps == 50
    assert (known(world).trained_step, world.status.timings.lost) == (500, 200.0)


def test_a_failed_save_is_an_event_that_names_what_there_is() -> None:
    world = saves()
    world.reported = ReportedCheckpoint(step=50, failed_saves=1)
    world.reconcile()
    assert ("SaveFailed", "a checkpoint could not be saved; the newest one is of step 50") in said(world)
    world.events.clear()
    world.reported = ReportedCheckpoint(step=100, failed_saves=0)
    world.reconcile()
    assert known(world).failed_saves == 0
    assert said(world) == []


def test_damaged_checkpoints_that_were_passed_over_are_an_event() -> None:
    world = saves()
    world.reported = ReportedCheckpoint(step=50, restored=ReportedRestore("1.2", 50, "store", 1.0, passed_over=2))
    world.reconcile()
    assert ("CheckpointDamaged", "2 newer checkpoint(s) are damaged: step 50 was restored") in said(world)


def test_a_job_that_begins_without_a_checkpoint_says_so() -> None:
    world = saves()
    world.reported = ReportedCheckpoint(restored=ReportedRestore("1.1", 0, lost_steps=0))
    world.reconcile()
    assert ("Restored", "training starts at step 0: there was no checkpoint") in said(world)


def test_a_save_is_overdue_after_three_intervals_and_is_looked_for_then() -> None:
    world = saves(every="10m")
    world.reported = ReportedCheckpoint(step=50, at=world.now)
    world.now += 31
    made = world.reconcile()
    began = world.status.transitions[-1].start.timestamp()
    saved = known(world).time
    assert saved is not None
    newest = max(began, saved.timestamp())
    assert made.requeue_at is not None
    assert made.requeue_at <= newest + 1800
    world.now = newest + 1801
    world.reconcile()
    assert world.status.is_true(ConditionType.CHECKPOINT_STALE)
    assert [reason for reason, _ in said(world)].count("CheckpointOverdue") == 1
    world.reported = ReportedCheckpoint(step=90, at=world.now)
    world.reconcile()
    stale = world.status.condition(ConditionType.CHECKPOINT_STALE)
    assert stale is not None
    assert (stale.status, stale.reason) == ("False", "CheckpointCurrent")


@pytest.mark.parametrize(("every", "limit"), [(7200, 21_600), (0, 3600), (60, 180)])
def test_the_interval_of_a_script_counts_and_not_that_of_its_job(every: int, limit: int) -> None:
    world = saves(every="10m")
    world.reported = ReportedCheckpoint(step=50, at=world.now, every=every)
    world.reconcile()
    for seconds, is_stale in ((limit - 1, False), (limit + 1, True)):
        world.now = world.status.transitions[-1].start.timestamp() + seconds
        world.reconcile()
        assert world.status.is_true(ConditionType.CHECKPOINT_STALE) is is_stale


def test_a_job_that_was_to_save_and_never_did_is_overdue_too() -> None:
    world = saves(every="10m")
    world.now += 1801
    world.reconcile()
    assert world.status.is_true(ConditionType.CHECKPOINT_STALE)


@pytest.mark.parametrize(
    "job_",
    [
        job().spec(checkpoint={"store": "s3://bucket/run", "folder": {"marker": "DONE"}}),
        job().spec(checkpoint={"volume": {"persistentVolumeClaim": {"claimName": "mine"}}}),
        job().plain().spec(checkpoint={"store": "s3://bucket/run"}),
    ],
    ids=["published folder", "own files in a volume", "plain mode"],
)
def test_saves_of_which_nobody_would_hear_are_not_missed(job_: JobBuilder) -> None:
    world = World(job_.build()).run("Running")
    world.now += 7200
    world.reconcile()
    assert world.phase == "Running"
    assert world.status.condition(ConditionType.CHECKPOINT_STALE) is None


def test_steps_that_are_trained_again_do_not_count_as_good() -> None:
    world = saves()
    world.train(500)
    world.now += 100
    world.reconcile()
    world.fail_rank()
    world.run("Running")
    assert world.status.progress is not None
    assert world.status.progress.steps_per_second == 1.0
    world.reported = ReportedCheckpoint(step=470, restored=ReportedRestore("1.2", 470, lost_steps=30))
    world.reconcile()
    timings = world.status.timings
    assert timings.lost == 30.0
    assert timings.goodput == round((timings.running - 30) / (timings.running + timings.recovering), 4)


def test_whatever_a_leader_says_of_rates_and_lost_steps_the_status_can_be_written() -> None:
    """A status that holds what JSON does not know is rejected, and the job would stand still."""
    world = saves()
    world.now += 100
    world.reconcile()
    assert world.leader is not None
    progress = TrainingProgress(step=500, steps_per_second=5e-324)
    world.job = world.job.model_copy(update={"status": world.status.model_copy(update={"progress": progress})})
    for generation in (2, 3):
        restored = ReportedRestore(f"1.{generation}", 0, lost_steps=MAX_STEPS)
        world.reported = ReportedCheckpoint(step=470, restored=restored)
        world.reconcile()
    json.dumps(world.status.manifest(), allow_nan=False)
    assert known(world).lost_steps == MAX_STEPS
    assert world.status.timings.lost <= 200
