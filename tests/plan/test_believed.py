"""Labels and names of pods, and ids that leaders give, are believed as far as this operator can have written them."""

from __future__ import annotations

import dataclasses

import pytest

from everstep_operator.api.status import Cause, Charge
from everstep_operator.plan.leader_view import MAX_ORDINAL, ReportedGeneration
from everstep_operator.plan.plan_context import to_utc
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
    world.leader.ledger.append(ReportedGeneration(f"{MAX_ORDINAL}.1", "PodLost", ended_at=world.now))
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
