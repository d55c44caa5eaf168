"""Survivors stay, lost pods are made again, and never before the old object is gone."""

from __future__ import annotations

import dataclasses

import pytest

from everstep_operator.api.reasons import Reason
from everstep_operator.plan.actions import CreatePods, DeletePods, JobPlan
from everstep_operator.plan.agent_volume import find_agent_config_map
from everstep_operator.plan.leader_view import UncleanPod
from everstep_operator.plan.observation import ContainerEnd, TerminationMessage
from everstep_operator.plan.pod_replacement import explain_loss
from tests.builders import job
from tests.plan.world import World


def running(nodes: int = 3) -> World:
    return World(job().nodes(nodes).build()).run("Running")


def created(made: JobPlan) -> list[tuple[tuple[int, ...], int]]:
    return [(a.indices, a.epoch) for a in made.actions if isinstance(a, CreatePods)]


def deleted(made: JobPlan) -> list[str]:
    return [ref.name for a in made.actions if isinstance(a, DeletePods) for ref in a.pods]


def test_a_killed_container_is_deleted_first_and_made_again_when_it_is_gone() -> None:
    world = running()
    world.kill(1)
    world.lead()
    made = world.reconcile()
    assert deleted(made) == ["digits-1"]
    assert created(made) == []
    assert created(world.reconcile()) == [], "it is still there"
    world.bury()
    assert created(world.reconcile()) == [((1,), 1)]


def test_deletes_carry_the_uid() -> None:
    world = running()
    world.kill(1)
    world.lead()
    (action,) = [a for a in world.reconcile().actions if isinstance(a, DeletePods)]
    assert [ref.uid for ref in action.pods] == ["pod-2"]


def test_pod_0_is_made_again_under_a_higher_epoch() -> None:
    world = running()
    world.vanish(0)
    made = world.reconcile()
    assert created(made) == [((0,), 2)]
    assert world.status.epoch == 2, "written in the same plan, before the pod"
    assert {p.epoch for p in world.pods.values()} == {1, 2}, "survivors stay as they are"


def test_a_replacement_comes_from_the_frozen_template() -> None:
    world = running()
    world.settings = dataclasses.replace(world.settings, agent_digest="f" * 64)
    world.vanish(1)
    (action,) = [a for a in world.reconcile().actions if isinstance(a, CreatePods)]
    assert find_agent_config_map(action.frozen.pod["spec"]) == "everstep-agent-000000000000"


def test_a_pod_stuck_terminating_is_waited_for() -> None:
    world = running()
    world.delete(1)
    world.now += 600
    made = world.reconcile()
    assert created(made) == []
    assert deleted(made) == []


def test_a_pod_its_leader_calls_unclean_is_replaced_once() -> None:
    world = running()
    world.unclean = (UncleanPod(2, "pod-3", "pid 77 does not die"),)
    assert deleted(world.reconcile()) == ["digits-2"]
    world.bury()
    world.reconcile()
    assert deleted(world.reconcile()) == [], "the complaint is about its predecessor"


def test_pods_that_the_kubelet_refuses_are_not_made_again_at_once() -> None:
    world = World(job().nodes(2).build())
    world.reconcile()
    world.now += 1
    world.bind()
    refused = ContainerEnd(None, None, "UnexpectedAdmissionError", "no devices", world.now)
    world.pods["digits-1"] = dataclasses.replace(world.pods["digits-1"], ended=refused)
    made = world.reconcile()
    assert deleted(made) == []
    assert made.requeue_at == world.now + 9
    world.now += 9
    assert deleted(world.reconcile()) == ["digits-1"]


def test_agents_that_fail_at_their_start_are_not_made_again_at_once() -> None:
    world = World(job().nodes(2).build())
    world.reconcile()
    world.bind()
    world.start()
    failed = ContainerEnd(1, None, "Error", "", world.now, TerminationMessage("left"))
    world.pods["digits-1"] = dataclasses.replace(world.pods["digits-1"], ended=failed)
    assert deleted(world.reconcile()) == []
    world.now += 10
    assert deleted(world.reconcile()) == ["digits-1"]


def test_nor_are_replacements_whose_agents_fail_at_their_start() -> None:
    world = running()
    world.vanish(1)
    world.reconcile()
    world.bind()
    world.start()
    failed = ContainerEnd(1, None, "Error", "", world.now, TerminationMessage("left"))
    world.pods["digits-1"] = dataclasses.replace(world.pods["digits-1"], ended=failed)
    world.lead()
    assert deleted(world.reconcile()) == []
    world.now += 10
    assert deleted(world.reconcile()) == ["digits-1"]


def test_a_pod_that_somebody_deleted_was_deleted_also_when_its_agent_has_left() -> None:
    pod = running().pods["digits-1"]
    left = dataclasses.replace(pod, ended=ContainerEnd(143, 15, "Error", "", None, TerminationMessage("left")))
    assert explain_loss(dataclasses.replace(left, deleting_since=1.0)) is Reason.POD_DELETED
    assert explain_loss(left) is Reason.POD_LOST, "the agent itself failed"


def test_a_pod_that_a_finalizer_keeps_is_named_with_it() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.delete(1)
    world.kill(1)
    world.pods["digits-1"] = dataclasses.replace(world.pods["digits-1"], finalizers="example.com/hold")
    for _ in range(5):
        world.now += 10
        world.reconcile()
    assert world.phase == "Restarting"
    said = world.status.conditions[0].message
    assert said == "pod digits-1 has ended and cannot be replaced before its finalizers are gone: example.com/hold"
    world.vanish(1)
    world.run("Running")
    assert "finalizers" not in world.status.conditions[0].message


@pytest.mark.parametrize("resumed", [False, True])
def test_a_pod_that_a_finalizer_keeps_from_a_suspension_or_a_resume_is_named_with_it(resumed: bool) -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.delete(1)
    world.kill(1)
    world.pods["digits-1"] = dataclasses.replace(world.pods["digits-1"], finalizers="example.com/hold")
    world.edit(suspend=True)
    world.reconcile()
    world.vanish(0)
    world.now += 60
    world.reconcile()
    if resumed:
        world.edit(suspend=False)
        for _ in range(3):
            world.reconcile()
            world.now += 60
    assert world.phase == ("Pending" if resumed else "Stopping")
    said = "pod digits-1 has ended and cannot be replaced before its finalizers are gone: example.com/hold"
    assert world.status.conditions[0].message == said
    if resumed:
        world.now += world.job.spec.timeouts.pending.total_seconds()
        world.reconcile()
        assert world.phase == "Failed"
        assert world.status.conditions[0].message.endswith(said)
    else:
        world.vanish(1)
        world.run("Suspended")


def test_a_suspension_names_a_pod_for_which_it_waits() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.edit(suspend=True)
    world.reconcile()
    world.vanish(0)
    world.now += 60
    world.reconcile()
    where = world.pods["digits-1"].node
    assert world.status.conditions[0].message == f"waiting for the pods to stop: digits-1 on {where}, 1 in all"


def test_a_pod_that_a_finalizer_keeps_from_a_start_is_named_with_it() -> None:
    world = World(job().nodes(2).build()).run("Starting")
    world.start()
    world.delete(1)
    world.kill(1)
    world.pods["digits-1"] = dataclasses.replace(world.pods["digits-1"], finalizers="example.com/hold")
    for _ in range(5):
        world.now += 10
        world.reconcile()
    assert world.phase == "Starting"
    assert "example.com/hold" in world.status.conditions[0].message
    world.vanish(1)
    world.run("Running")
    assert "finalizers" not in world.status.conditions[0].message


def test_a_pod_of_a_former_job_that_a_finalizer_keeps_is_named_with_it() -> None:
    world = World(job().nodes(2).build())
    former = World(job().nodes(2).meta(uid="former").build()).run("Running").pods["digits-1"]
    world.pods["digits-1"] = dataclasses.replace(
        former, deleting_since=world.now, finalizers="example.com/hold", scheduled_at=None
    )
    world.reconcile()
    world.now += 1
    world.reconcile()
    said = world.status.conditions[0].message
    assert said == "pod digits-1 has ended and cannot be replaced before its finalizers are gone: example.com/hold"


def test_a_pod_of_a_node_whose_clock_is_ahead_is_replaced_at_once() -> None:
    """Another rank's failure is on record: that the leader tells of the pod's end too is not waited for as long."""
    world = World(job().nodes(2).build()).run("Running")
    world.fail_rank(1)
    world.kill(1, reason="OOMKilled")
    pod = world.pods["digits-1"]
    assert pod.ended is not None
    ended = dataclasses.replace(pod.ended, finished_at=world.now + 3600)
    world.pods["digits-1"] = dataclasses.replace(pod, ended=ended)
    world.run("Restarting")
    world.run("Running", limit=60)
    assert world.pods["digits-1"].uid != pod.uid
