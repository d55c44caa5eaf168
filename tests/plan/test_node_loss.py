"""A node is dead when its agent and its kubelet are both silent, and not when most of them are silent together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from everstep_operator.api.status import Cause, ConditionType
from everstep_operator.plan.actions import CreatePods, DeletePods, JobPlan
from everstep_operator.plan.affinity import exclude_nodes, is_node_allowed
from everstep_operator.plan.node_loss import CONFIRM_SECONDS, JOIN_SECONDS, describe_brake
from everstep_operator.plan.node_view import NodeView
from tests.builders import job
from tests.plan.world import World


def running(nodes: int = 4, **restart: object) -> World:
    return World(job().nodes(nodes).restart(**restart).build()).run("Running")


def forced(made: JobPlan) -> list[str]:
    """Names of pods that are deleted without waiting for their kubelet."""
    return [ref.name for a in made.actions if isinstance(a, DeletePods) for ref in a.pods if ref.grace_seconds == 0]


def condition(world: World) -> tuple[str, str]:
    told = world.status.condition(ConditionType.NODES_HEALTHY)
    assert told is not None
    return told.reason, told.message


@pytest.mark.parametrize("index", [0, 2])
def test_a_dead_node_s_pod_is_replaced_elsewhere_and_charged_once(index: int) -> None:
    world = running()
    world.silence_node(index)
    dead = world.pods[f"digits-{index}"].node
    if index == 0:
        assert forced(world.reconcile()) == [], "a machine that stands still for less than the fence timeout goes on"
        world.now += world.settings.fence_timeout
    world.lead()
    assert forced(world.reconcile()) == [f"digits-{index}"]
    assert condition(world)[0] == "NodeLost"
    made = world.reconcile()
    (created,) = [a for a in made.actions if isinstance(a, CreatePods)]
    assert created.indices == (index,)
    assert created.avoid == (dead,), "the scheduler takes the node for Ready for another half minute"
    world.run("Running")
    assert world.status.restarts.infrastructure == 1
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.reason, failure.cause, failure.node) == ("NodeLost", Cause.INFRASTRUCTURE, dead)
    assert world.status.epoch == (2 if index == 0 else 1)


@pytest.mark.parametrize("silent", [{"lease": True, "agent": False}, {"lease": False, "agent": True}])
@pytest.mark.parametrize("index", [0, 2])
def test_one_of_the_two_alone_proves_nothing(index: int, silent: dict[str, bool]) -> None:
    """A kubelet that restarts renews no Lease, and its pods train on; an agent may be cut off from its leader only."""
    world = running()
    world.silence_node(index, **silent)
    for _ in range(60):
        world.now += 1.0
        assert forced(world.reconcile()) == []


def test_the_lease_of_a_silent_agent_s_node_is_asked_for_and_of_no_other() -> None:
    world = running()
    assert world.reconcile().suspects == frozenset()
    world.silence_node(2, lease=False)
    assert world.reconcile().suspects == {world.pods["digits-2"].node}
    world.mute.clear()
    world.silence_node(0, lease=False)
    every = {pod.node for pod in world.pods.values()}
    assert world.reconcile().suspects == every, "a network that is cut in two silences others too"


def test_agents_that_have_not_joined_yet_are_no_suspects_until_they_should_have() -> None:
    world = World(job().nodes(2).build())
    world.reconcile()
    world.tick()
    world.start()
    world.silence_node(1, lease=False)
    world.lead()
    made = world.reconcile()
    assert made.suspects == frozenset()
    assert made.requeue_at is not None
    assert made.requeue_at <= world.now + JOIN_SECONDS
    world.now += JOIN_SECONDS
    assert world.reconcile().suspects == {world.pods["digits-1"].node}


def test_most_nodes_of_a_job_that_are_silent_together_are_held() -> None:
    world = running(4)
    for index in (1, 2, 3):
        world.silence_node(index)
    assert forced(world.reconcile()) == []
    reason, message = condition(world)
    assert reason == "Held"
    assert "3 of 4 of the job's nodes are silent at once" in message
    world.mute.clear()
    world.nodes.clear()
    for _ in range(5):
        world.tick()
        assert forced(world.reconcile()) == []
    world.run("Running")
    assert world.status.restarts.infrastructure <= 1


def test_half_of_them_are_not_most() -> None:
    world = running(4)
    for index in (2, 3):
        world.silence_node(index)
    assert sorted(forced(world.reconcile())) == ["digits-2", "digits-3"]


def test_a_brake_of_the_zone_holds_the_job_too() -> None:
    world = running(4)
    world.silence_node(2)
    name = str(world.pods["digits-2"].node)
    world.nodes[name] = dataclasses.replace(world.nodes[name], held="2 of 3 of zone b are silent at once")
    assert forced(world.reconcile()) == []
    assert condition(world)[0] == "Held"


def test_a_node_that_is_heard_again_before_it_is_replaced_costs_nothing() -> None:
    world = running(4, fencing="strict")
    world.silence_node(2)
    assert forced(world.reconcile()) == [], "under strict fencing its ranks must have ended first"
    world.nodes.clear()
    world.mute.clear()
    for _ in range(200):
        world.tick()
        assert forced(world.reconcile()) == []
    assert world.phase == "Running"


def test_under_strict_fencing_its_ranks_have_ended_before() -> None:
    world = running(4, fencing="strict")
    world.silence_node(2)
    fenced = world.now + world.settings.fence_timeout + 10
    assert forced(world.reconcile()) == []
    world.now = fenced
    assert forced(world.reconcile()) == ["digits-2"]


def given_up(world: World, index: int) -> None:
    """Kubernetes has evicted the pod of a node that it does not hear of; nobody confirms its end."""
    world.delete(index, disruption="DeletionByTaintManager")
    node = str(world.pods[f"digits-{index}"].node)
    known = world.nodes.get(node) or NodeView(node)
    world.nodes[node] = dataclasses.replace(known, ready=False, not_ready_because="NodeStatusUnknown")


def test_pods_that_nobody_can_confirm_the_end_of_are_forced_out_though_most_are_silent() -> None:
    """Somebody has decided already that they go: without this the job would hang for ever."""
    world = running(4)
    for index in (1, 2, 3):
        world.silence_node(index)
        given_up(world, index)
    patience = world.settings.termination_grace + CONFIRM_SECONDS
    made = world.reconcile()
    assert forced(made) == []
    assert made.requeue_at is not None
    assert made.requeue_at <= world.now + patience
    world.now += patience
    assert sorted(forced(world.reconcile())) == ["digits-1", "digits-2", "digits-3"]


def test_a_pod_that_is_deleted_while_its_agent_is_heard_keeps_its_time() -> None:
    world = running(4)
    world.silence_node(2, agent=False)
    given_up(world, 2)
    world.now += world.settings.termination_grace + CONFIRM_SECONDS
    assert forced(world.reconcile()) == []


@pytest.mark.parametrize(
    ("silent", "nodes", "brakes"),
    [(1, 1, False), (2, 2, False), (2, 3, True), (1, 3, False), (2, 4, False), (3, 4, True)],
)
def test_more_than_half_of_three_or_more_is_too_many(silent: int, nodes: int, brakes: bool) -> None:
    assert bool(describe_brake(silent, nodes, "zone a")) == brakes


def required(terms: list[dict[str, Any]]) -> dict[str, Any]:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        required([{"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}]),
        required(
            [
                {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]},
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]},
            ]
        ),
    ],
)
def test_dead_nodes_are_excluded_beside_whatever_else_a_pod_requires(own: dict[str, Any]) -> None:
    spec = {"affinity": exclude_nodes(own, ["n1", "n2"])}
    for name in ("n1", "n2"):
        assert not is_node_allowed(spec, name, {"disk": "ssd"})
    assert is_node_allowed(spec, "n3", {"disk": "ssd"})
    assert is_node_allowed(spec, "n3", {}) == is_node_allowed({"affinity": own}, "n3", {})
    assert {k: v for k, v in spec["affinity"].items() if k != "nodeAffinity"} == {
        k: v for k, v in own.items() if k != "nodeAffinity"
    }
