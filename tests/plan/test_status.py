"""Few writes, honest times, and the same status from the same inputs."""

from __future__ import annotations

from datetime import timedelta

from everstep_operator.api.status import ConditionType
from everstep_operator.plan import make_plan
from tests.builders import job
from tests.plan.world import World


def test_progress_is_written_every_30_s_at_most() -> None:
    world = World(job().build()).run("Running")
    written = len(world.statuses)
    for _ in range(60):
        world.tick(1)
        world.reconcile()
    assert len(world.statuses) - written == 2
    assert world.status.progress is not None


def test_a_held_back_change_has_its_time() -> None:
    world = World(job().build()).run("Running")
    world.tick(1)
    made = world.reconcile()
    assert not made.changed
    assert made.requeue_at == world.written_at + 30 if world.written_at else False


def test_phases_that_pass_within_a_moment_are_one_write() -> None:
    """While kubelets begin with the pods, the API server has better things to do."""
    world = World(job().nodes(2).build())
    world.reconcile()
    assert world.phase == "Scheduling"
    world.bind()
    held = world.reconcile()
    assert not held.changed
    assert not held.events
    assert held.requeue_at == world.now + 0.5
    world.now += 0.5
    world.reconcile()
    assert world.phase == "Starting"


def test_a_clock_that_is_set_back_holds_no_status_up() -> None:
    world = World(job().nodes(2).build())
    world.reconcile()
    world.bind()
    world.now -= 3600
    assert world.reconcile().changed


def test_the_last_progress_comes_with_the_end() -> None:
    world = World(job().build()).run("Running")
    world.train(500)
    world.end()
    world.run("Succeeded")
    assert world.status.progress is not None
    assert world.status.progress.step == 500


def test_steps_go_back_to_a_checkpoint_only() -> None:
    world = World(job().build()).run("Running")
    world.train(500)
    world.save()
    world.train(100)
    world.now += 31
    world.reconcile()
    assert world.status.progress is not None
    assert world.status.progress.step == 600
    world.fail_rank()
    world.run("Running")
    assert world.status.progress is not None
    assert world.status.progress.step == 500


def test_timings_add_up() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.now += 100
    world.fail_rank()
    world.reconcile()
    world.now += 10
    world.run("Running")
    world.now += 89
    world.end()
    world.run("Succeeded")
    timings = world.status.timings
    assert timings.running >= 189
    assert 10 <= timings.recovering <= 13
    assert timings.goodput is not None
    assert 0.9 < timings.goodput < 1
    first, last = world.status.transitions[0], world.status.transitions[-1]
    total = timings.pending + timings.scheduling + timings.starting + timings.running + timings.recovering
    assert round(total, 2) == round((last.start - first.start).total_seconds(), 2)


def test_transitions_are_bounded() -> None:
    world = World(job().restart(application=1000).build()).run("Running")
    for _ in range(40):
        world.fail_rank()
        world.reconcile()
        world.run("Running")
    assert len(world.status.transitions) == 32
    assert world.status.transitions[-1].end is None


def test_a_conditions_time_changes_with_its_status_only() -> None:
    world = World(job().nodes(2).build()).run("Starting")
    before = world.status.condition(ConditionType.READY)
    world.run("Running")
    world.fail_rank()
    world.reconcile()
    after = world.status.condition(ConditionType.STALLED)
    assert before is not None
    assert after is not None
    assert before.last_transition_time == after.last_transition_time
    ready = world.status.condition(ConditionType.READY)
    assert ready is not None
    assert ready.last_transition_time > before.last_transition_time


def test_an_end_that_somebody_has_written_does_not_stay_while_the_job_goes_on() -> None:
    """`kubectl wait --for=condition=Failed` would be over, and tools would take the job for failed ever after."""
    world = World(job().build()).run("Running")
    ready = world.status.conditions[0]
    told = [ready.model_copy(update={"type": each}) for each in (ConditionType.COMPLETE, ConditionType.FAILED)]
    status = world.status.model_copy(update={"conditions": [*told, *world.status.conditions]})
    world.job = world.job.model_copy(update={"status": status})
    world.reconcile()
    assert world.status.condition(ConditionType.FAILED) is None
    assert world.status.condition(ConditionType.COMPLETE) is None
    assert world.status.is_true(ConditionType.READY)


def test_kstatus_reads_the_job() -> None:
    world = World(job().build())
    world.reconcile()
    assert world.status.is_true(ConditionType.RECONCILING)
    world.run("Running")
    assert world.status.is_true(ConditionType.READY)
    assert not world.status.is_true(ConditionType.RECONCILING)
    world.end("succeeded")
    world.run("Succeeded")
    assert world.status.is_true(ConditionType.COMPLETE)
    assert world.status.is_true(ConditionType.READY)


def test_an_edit_is_acknowledged() -> None:
    world = World(job().build()).run("Running")
    world.edit(ttl_after_finished=timedelta(hours=1))
    world.reconcile()
    assert world.status.observed_generation == 2
    assert {c.observed_generation for c in world.status.conditions} == {2}


def test_the_same_inputs_make_the_same_plan() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.kill(1)
    world.lead()
    seen = world.observe()
    assert make_plan(seen, world.now) == make_plan(seen, world.now)
