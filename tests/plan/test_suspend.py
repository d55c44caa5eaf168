"""Suspension gives everything back and keeps the job."""

from __future__ import annotations

from everstep_operator.api.status import ConditionType
from everstep_operator.plan.actions import CreatePods, DeleteStale
from tests.builders import job
from tests.plan.world import World


def test_a_suspended_job_gives_everything_back() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.edit(suspend=True)
    world.reconcile()
    assert world.phase == "Stopping"
    assert all(p.deleting for p in world.pods.values())
    world.bury()
    made = world.reconcile()
    assert world.phase == "Suspended"
    assert world.status.is_true(ConditionType.SUSPENDED)
    assert world.status.nodes == 0
    assert DeleteStale(2) in made.actions


def test_suspension_is_no_failure() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.edit(suspend=True)
    world.run("Suspended")
    assert world.status.restarts.total == 0


def test_resuming_resolves_the_edited_job_under_a_new_template() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.edit(suspend=True)
    world.run("Suspended")
    world.edit(num_nodes=2)
    world.edit(suspend=False)
    made = world.reconcile()
    assert [a.indices for a in made.actions if isinstance(a, CreatePods)] == [(0, 1)]
    assert world.status.template is not None
    assert world.status.template.epoch == world.status.epoch == 2
    assert not world.status.is_true(ConditionType.SUSPENDED)
    world.run("Running")


def test_a_resume_waits_for_the_old_pods() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.edit(suspend=True)
    world.reconcile()
    world.edit(suspend=False, image="example.com/trainer:2")
    made = world.reconcile()
    assert not [a for a in made.actions if isinstance(a, CreatePods)]
    assert world.phase == "Pending"
    world.run("Running")
    assert {p.template for p in world.pods.values()} == {2}


def test_a_job_born_suspended_makes_nothing() -> None:
    world = World(job().suspended().build())
    made = world.reconcile()
    assert world.phase == "Suspended"
    assert made.actions == ()


def test_a_leader_is_renewed_until_its_pod_is_gone() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.edit(suspend=True)
    assert world.reconcile().poll is not None, (
        "unrenewed, it could not publish a last checkpoint after the fence timeout"
    )
    world.bury()
    assert world.run("Suspended").reconcile().poll is None
