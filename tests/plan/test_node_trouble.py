"""Reports of a job about its nodes, and pods whose node was removed."""

from __future__ import annotations

import dataclasses

import pytest

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Cause, Condition, ConditionType
from everstep_operator.plan.actions import CreatePods, DeletePods, JobPlan, PodRef
from everstep_operator.plan.leader_view import SickGpu
from everstep_operator.plan.node_signals import NodeSignal
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import Observation
from tests.builders import job
from tests.plan.world import World

CORDONED = NodeSignal(Reason.NODE_DRAINING, "cordoned")


def running(nodes: int = 3, **restart: object) -> World:
    return World(job().nodes(nodes).restart(**restart).build()).run("Running")


def deleted(made: JobPlan) -> tuple[PodRef, ...]:
    return tuple(ref for a in made.actions if isinstance(a, DeletePods) for ref in a.pods)


def created(made: JobPlan) -> list[tuple[int, ...]]:
    return [a.indices for a in made.actions if isinstance(a, CreatePods)]


def healthy(world: World) -> Condition | None:
    return world.status.condition(ConditionType.NODES_HEALTHY)


def test_a_node_that_is_not_ready_is_told_and_nothing_is_done() -> None:
    world = running()
    world.nodes["node-1"] = NodeView("node-1", ready=False, not_ready_because="NodeStatusUnknown")
    made = world.reconcile()
    told = healthy(world)
    assert told is not None
    assert (told.status, told.reason) == ("False", "NodeNotReady")
    assert told.message == "digits-1 is on node-1, which is not Ready (NodeStatusUnknown)"
    assert [(e.type, e.reason) for e in made.events] == [("Warning", "NodeNotReady")]
    assert world.phase == "Running"
    assert not deleted(made)


def test_a_gpu_in_trouble_is_told_and_nothing_is_done() -> None:
    world = running()
    lost = SickGpu(1, "H100", "the driver does not show it any more")
    world.sick_gpus = (lost, dataclasses.replace(lost, problem="3 uncorrected memory errors"), SickGpu(9, "H100", "?"))
    made = world.reconcile()
    told = healthy(world)
    assert told is not None
    assert (told.status, told.reason) == ("False", "GpuUnhealthy")
    assert told.message == (
        "digits-1 is on node-1, which has a GPU with a problem (H100: the driver does not show it any more)"
    )
    assert [(e.type, e.reason) for e in made.events] == [("Warning", "GpuUnhealthy")]
    assert not deleted(made)
    world.nodes["node-2"] = NodeView("node-2", signal=CORDONED)
    world.reconcile()
    told = healthy(world)
    assert told is not None
    assert told.reason == "NodeDraining", "what is about to end pods is told first"


def test_it_is_told_once_and_so_is_that_it_is_over() -> None:
    world = running()
    world.nodes["node-1"] = NodeView("node-1", signal=CORDONED)
    world.reconcile()
    told = healthy(world)
    assert told is not None
    assert told.reason == "NodeDraining"
    assert not world.reconcile().events
    del world.nodes["node-1"]
    assert not world.reconcile().events
    told = healthy(world)
    assert told is not None
    assert (told.status, told.reason) == ("True", "NodesHealthy")


def test_a_job_whose_nodes_were_always_well_says_nothing_of_them() -> None:
    assert healthy(running()) is None


def test_the_worst_is_told_and_how_many_more_there_are() -> None:
    world = running(4)
    world.nodes["node-0"] = NodeView(
        "node-0", signal=NodeSignal(Reason.SCALE_DOWN, "taint karpenter.sh/disrupted", 120)
    )
    for name in ("node-2", "node-3"):
        world.nodes[name] = NodeView(name, ready=False, not_ready_because="KubeletNotReady")
    world.reconcile()
    told = healthy(world)
    assert told is not None
    assert told.message.startswith("digits-2 is on node-2, ")
    assert told.message.endswith(", and 1 more pods are on such nodes")


def test_a_pod_whose_node_was_removed_is_forced_out_and_made_again_at_once() -> None:
    world = running()
    world.remove_node(1)
    made = world.reconcile()
    assert [(ref.name, ref.grace_seconds) for ref in deleted(made)] == [("digits-1", 0)]
    assert created(made) == [], "only when the object is gone: the name is the lock"
    assert created(world.reconcile()) == [(1,)]
    world.run("Running")


def test_it_is_a_lost_node_that_is_charged() -> None:
    world = running()
    world.remove_node(0)
    world.reconcile()
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.reason, failure.cause, failure.node) == ("NodeLost", Cause.INFRASTRUCTURE, "node-0")
    world.run("Running")
    assert world.status.restarts.infrastructure == 1
    assert world.status.epoch == 2, "it was the leader's"


def test_a_pod_that_cannot_end_because_its_node_was_removed_is_forced_out_too() -> None:
    world = running()
    world.delete(1)
    world.reconcile()
    world.remove_node(1)
    world.bury()
    assert [(ref.name, ref.grace_seconds) for ref in deleted(world.reconcile())] == [("digits-1", 0)]


def test_under_strict_fencing_the_ranks_of_the_lost_pod_have_ended_before() -> None:
    world = running(fencing="strict")
    world.remove_node(1)
    made = world.reconcile()
    assert not deleted(made)
    assert not created(made)
    fenced = world.now + world.settings.fence_timeout + 10
    assert made.requeue_at is not None
    assert made.requeue_at <= fenced
    world.now = fenced - 0.1
    assert not deleted(world.reconcile())
    world.now = fenced
    assert [ref.grace_seconds for ref in deleted(world.reconcile())] == [0]


@pytest.mark.parametrize("index", [0, 1])
def test_under_strict_fencing_a_node_that_comes_back_in_time_costs_no_generation(index: int) -> None:
    """A kubelet that is restarted registers its Node anew; the ranks on it have run all the while."""
    world = running(fencing="strict")
    world.tick(60)
    world.reconcile()
    pods = {pod.uid for pod in world.pods.values()}
    world.remove_node(index)
    world.reconcile()
    assert world.phase == "Restarting"
    world.tick(5)
    world.reconcile()
    world.nodes.clear()
    made = world.reconcile()
    for _ in range(3):
        assert made.requeue_at is not None
        world.tick(made.requeue_at - world.now)
        made = world.reconcile()
        if world.phase == "Running":
            break
    assert world.phase == "Running"
    assert {pod.uid for pod in world.pods.values()} == pods
    assert world.status.generation == 1
    assert world.status.restarts.total == 0
    assert world.status.last_failure is None
    world.end()
    world.run("Succeeded")


def test_under_strict_fencing_a_node_that_comes_back_in_time_ends_no_job_without_a_budget() -> None:
    world = running(fencing="strict", infrastructure=0)
    world.remove_node(0)
    world.reconcile()
    assert world.phase == "Restarting"
    world.nodes.clear()
    world.run("Running", limit=10)


@pytest.mark.parametrize("index", [0, 1])
def test_under_strict_fencing_a_node_that_stays_away_is_charged_once(index: int) -> None:
    world = running(fencing="strict")
    world.leader_reachable = index == 0  # nobody but the operator knows of the loss
    world.tick(20)
    world.reconcile()
    world.remove_node(index)
    world.reconcile()
    assert world.status.restarts.total == 0
    world.now += world.settings.fence_timeout + 10
    assert deleted(world.reconcile())
    assert world.status.restarts.infrastructure == 1
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.reason, failure.node) == ("NodeLost", f"node-{index}")
    world.leader_reachable = True
    world.run("Running")
    assert world.status.restarts.total == 1


def test_an_answer_from_before_a_node_came_back_proves_nothing() -> None:
    world = running(fencing="strict")
    world.tick(60)
    world.reconcile()
    world.leader_reachable = False  # what it last said stands for some seconds
    world.now += 1
    world.remove_node(1)
    world.reconcile()
    world.now += 1
    world.nodes.clear()
    world.reconcile()
    assert world.phase == "Restarting"
    world.leader_reachable = True
    world.run("Running", limit=10)


@pytest.mark.parametrize(("nodes", "frozen", "configured", "expected"), [(2, 60, 40, 60), (2000, 5, 5, 40)])
def test_agents_that_were_given_a_longer_fence_timeout_have_it(
    nodes: int, frozen: float, configured: float, expected: float
) -> None:
    """By an operator that was configured otherwise, or because the job is large."""
    world = World(job().nodes(nodes).restart(fencing="strict").build(), capacity=nodes)
    world.settings = dataclasses.replace(world.settings, fence_timeout=frozen)
    world.run("Running")
    world.settings = dataclasses.replace(world.settings, fence_timeout=configured)
    world.remove_node(1)
    world.reconcile()
    world.now += expected + 9.9
    assert not deleted(world.reconcile())
    world.now += 0.1
    assert deleted(world.reconcile())


def test_a_leader_on_a_removed_node_is_not_asked_to_go_on() -> None:
    world = running(fencing="strict")
    world.remove_node(0)
    assert world.reconcile().poll is None


def test_an_ended_pod_keeps_its_word_though_its_node_was_removed() -> None:
    world = World(job().nodes(2).plain().build()).run("Running")
    world.exit(1, 0)
    world.remove_node(1)
    made = world.reconcile()
    assert not deleted(made)
    world.exit(0, 0)
    world.run("Succeeded")


def test_a_plain_set_that_lost_a_node_is_made_again_as_a_whole() -> None:
    world = World(job().nodes(2).plain().build()).run("Running")
    world.remove_node(1)
    world.reconcile()
    assert world.phase == "Restarting"
    assert world.status.restarts.infrastructure == 1
    world.run("Running")
    assert {pod.epoch for pod in world.pods.values()} == {2}


def test_nodes_that_nobody_has_told_of_are_no_lost_nodes() -> None:
    observed: Observation = running().observe()
    assert all(pod.gone_since is None for pod in dataclasses.replace(observed, nodes={}).ours)
