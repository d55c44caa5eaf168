"""Labels and names of pods, and ids that leaders give, are believed as far as this operator can have written them."""

from __future__ import annotations

import dataclasses

import pytest

from everstep_operator.api.status import Cause, Charge, TrainingJobStatus
from everstep_operator.plan.leader_view import MAX_ORDINAL, ReportedGeneration
from everstep_operator.plan.observation import parse_pod
from everstep_operator.plan.plan_context import to_utc
from everstep_operator.plan.pod_manifest import build_pod
from tests.builders import job
from tests.plan.world import World


def plain(nodes: int = 2) -> World:
    return World(job().nodes(nodes).plain().build()).run("Running")


def relabel(world: World, name: str, epoch: int) -> None:
    world.pods[name] = dataclasses.replace(world.pods[name], epoch=epoch)


@pytest.mark.parametrize("epoch", [2, 7, MAX_ORDINAL, 0, -1])
@pytest.mark.parametrize("index", [0, 1])
def test_an_epoch_that_was_never_given_out_raises_none(epoch: int, index: int) -> None:
    world = plain()
    relabel(world, f"digits-{index}", epoch)
    world.exit(index, 1)
    for _ in range(30):
        world.tick()
        world.reconcile()
    assert world.phase == "Running"
    assert (world.status.epoch, world.status.restarts.total) == (2, 1), "one restart, as with the right label"


@pytest.mark.parametrize("epoch", [2, MAX_ORDINAL])
def test_a_running_set_is_left_alone_whatever_its_labels_become(epoch: int) -> None:
    world = plain()
    before = {pod.uid for pod in world.pods.values()}
    relabel(world, "digits-1", epoch)
    for _ in range(5):
        world.tick()
        world.reconcile()
    assert {pod.uid for pod in world.pods.values()} == before
    assert world.status.epoch == 1


def test_a_charge_of_an_epoch_that_was_never_given_out_ends_in_no_loop() -> None:
    """Stored by a version that believed its pods."""
    world = plain()
    charge = Charge(id=f"{MAX_ORDINAL}.1", cause=Cause.APPLICATION, time=to_utc(world.now))
    restarts = world.status.restarts.model_copy(update={"total": 1, "application": 1, "charges": [charge]})
    world.job = world.job.model_copy(update={"status": world.status.model_copy(update={"restarts": restarts})})
    for _ in range(30):
        world.tick()
        world.reconcile()
    assert (world.phase, world.status.epoch) == ("Running", 1)
    world.exit(1, 1)
    world.run("Restarting")
    world.run("Running")
    assert world.status.restarts.total == 2, "and what ends from now on is charged"


def test_a_leader_s_entry_of_an_epoch_that_was_never_given_out_is_not_charged() -> None:
    """It would be newer than all that follow, which then cost nothing."""
    world = World(job().nodes(2).build()).run("Running")
    assert world.leader is not None
    world.leader.history.append(ReportedGeneration(f"{MAX_ORDINAL}.1", "PodLost", ended_at=world.now))
    world.reconcile()
    assert world.status.restarts.total == 0
    world.fail_rank()
    world.run("Restarting")
    world.run("Running")
    assert world.status.restarts.application == 1


def test_a_pod_of_another_name_takes_nobody_s_place() -> None:
    """Whoever may create pods may give one the job's UID as owner, and any label."""
    world = plain()
    before = {pod.uid for pod in world.pods.values()}
    forged = dataclasses.replace(world.pods["digits-0"], name="forged", uid="forged", created=world.now, epoch=1)
    world.pods["forged"] = forged
    world.reconcile()
    assert {pod.uid for pod in world.pods.values() if not pod.deleting} == before
    assert world.phase == "Running"
    assert world.pods["forged"].deleting, "it says that it is ours"


@pytest.mark.parametrize("lost", ["epoch", "status"])
@pytest.mark.parametrize("index", [0, 1])
def test_an_epoch_that_the_status_has_lost_is_not_given_out_twice(lost: str, index: int) -> None:
    """By somebody who edits it, while no operator runs. The world fails the test if two leaders have one epoch."""
    world = World(job().nodes(2).build()).run("Running")
    for _ in range(3):
        world.vanish(0)
        world.run("Restarting")
        world.run("Running")
    assert world.status.epoch == 4
    edited = world.status.model_copy(update={"epoch": 1}) if lost == "epoch" else TrainingJobStatus()
    world.job = world.job.model_copy(update={"status": edited})
    world.restart_operator()
    world.leader_reachable = True
    world.reconcile()
    world.run("Running")
    world.vanish(index)
    world.reconcile()
    world.run("Running")
    assert world.status.epoch >= (5 if lost == "status" or index == 0 else 4)
    world.end()
    world.run("Succeeded")


def test_a_made_up_pod_raises_no_epoch_beyond_all_bounds() -> None:
    world = World(job().nodes(2).build()).run("Running")
    forged = dataclasses.replace(world.pods["digits-0"], name="forged", uid="forged", epoch=MAX_ORDINAL)
    world.pods["forged"] = forged
    world.reconcile()
    assert (world.phase, world.status.epoch) == ("Running", 1)


@pytest.mark.parametrize("label", ["1", "7", "", "many"])
def test_an_agents_epoch_is_read_where_nobody_can_change_it(label: str) -> None:
    frozen = World(job().nodes(2).build()).run("Running").observe().frozen
    assert frozen is not None
    body = build_pod(frozen, 1, 5)
    body["metadata"]["labels"]["everstep.dev/epoch"] = label
    assert parse_pod(body).epoch == 5
