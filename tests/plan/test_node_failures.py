"""A node on which jobs have failed before is avoided for a while; what fails everywhere is no fault of a node."""

from __future__ import annotations

import pytest

from everstep_operator.api.reasons import Reason
from everstep_operator.plan.actions import CreatePods
from everstep_operator.plan.affinity import prefer_other_nodes
from everstep_operator.plan.leader_view import SickGpu
from everstep_operator.plan.node_failures import NodeFailure, list_avoided_nodes
from everstep_operator.plan.node_signals import NodeSignal
from everstep_operator.plan.node_view import NodeView
from tests.builders import job
from tests.plan.world import World


def fail(
    namespace: str = "team-a", time: float = 100.0, *, hardware: bool = False, witnessed: bool = False
) -> NodeFailure:
    return NodeFailure(f"{namespace}/{time}", namespace, "digits", "PodLost", time, hardware, witnessed)


def avoided(
    *failures: NodeFailure, namespace: str | None = "team-a", since: float = 0.0, nodes: int = 8
) -> tuple[str, ...]:
    return list_avoided_nodes({"n1": failures}, namespace, since=since, nodes=nodes)


def test_one_loss_says_nothing_and_two_of_one_namespace_bind_only_its_own_pods() -> None:
    assert avoided(fail(time=1)) == ()
    assert avoided(fail(time=1), fail(time=2)) == ("n1",)
    assert avoided(fail(time=1), fail(time=2), namespace="team-b") == ()


def test_losses_of_two_namespaces_bind_everybody() -> None:
    assert avoided(fail("team-a"), fail("team-b"), namespace="team-c") == ("n1",)
    assert avoided(fail("team-a"), fail("team-b"), namespace=None) == ("n1",)


def test_a_device_with_a_problem_is_enough_but_only_the_node_s_own_word_binds_others() -> None:
    told, seen = fail(hardware=True), fail(hardware=True, witnessed=True)
    assert avoided(told) == ("n1",)
    assert avoided(told, namespace="team-b") == (), "an agent speaks for its job's users"
    assert avoided(seen, namespace="team-b") == ("n1",)


def test_failures_expire() -> None:
    assert avoided(fail(time=1), fail(time=50), since=10) == ()
    assert avoided(fail(time=20), fail(time=50), since=10) == ("n1",)


@pytest.mark.parametrize(("nodes", "expected"), [(0, 1), (3, 1), (8, 2), (100, 3)])
def test_most_nodes_stay_in_use_whatever_fails(nodes: int, expected: int) -> None:
    bad = {f"n{number}": [fail(time=number), fail(time=number + 0.5)] for number in (1, 2, 3)}
    found = list_avoided_nodes(bad, "team-a", since=0, nodes=nodes)
    assert found == ("n3", "n2", "n1")[:expected], "the newest first"


def running(nodes: int = 2) -> World:
    return World(job().nodes(nodes).build()).run("Running")


def node_of(world: World, index: int) -> str:
    node = world.pods[f"digits-{index}"].node
    assert node is not None
    return node


def test_a_pod_that_is_lost_speaks_against_its_node_once() -> None:
    world = running()
    node = node_of(world, 1)
    world.kill(1)
    world.lead()
    made = world.reconcile()
    assert {name: (each.reason, each.hardware) for name, each in made.node_failures.items()} == {
        node: ("ContainerKilled", False)
    }
    (charge,) = world.status.restarts.charges
    assert (charge.node, charge.reason) == (node, "ContainerKilled")
    assert world.reconcile().node_failures == {}
    world.run("Running")


@pytest.mark.parametrize("disruption", ["EvictionByEvictionAPI", "PreemptionByScheduler", None])
def test_what_somebody_has_decided_speaks_against_no_node(disruption: str | None) -> None:
    world = running()
    world.delete(1, disruption=disruption)
    world.kill(1)
    world.lead()
    assert world.reconcile().node_failures == {}


@pytest.mark.parametrize(("ready", "reason"), [(True, "Evicted"), (False, "NodeLost")])
def test_an_eviction_for_a_taint_speaks_against_a_node_only_where_the_node_is_in_trouble(
    *, ready: bool, reason: str
) -> None:
    """Kubernetes taints a node that does not answer with NoExecute, and so may an administrator."""
    world = running()
    node = node_of(world, 1)
    world.nodes[node] = NodeView(node, ready=ready, not_ready_because="" if ready else "NodeStatusUnknown")
    world.delete(1, disruption="DeletionByTaintManager")
    world.kill(1)
    world.lead()
    assert set(world.reconcile().node_failures) == (set() if ready else {node})
    assert world.status.last_failure is not None
    assert world.status.last_failure.reason == reason


def test_a_failure_of_the_program_speaks_against_no_node() -> None:
    world = running()
    world.fail_rank()
    assert world.reconcile().node_failures == {}


@pytest.mark.parametrize("witnessed", [False, True])
def test_a_gpu_with_a_problem_is_told_of_as_long_as_it_is_there(*, witnessed: bool) -> None:
    world = running()
    node = node_of(world, 1)
    if witnessed:
        world.nodes[node] = NodeView(node, signal=NodeSignal(Reason.GPU_UNHEALTHY, "condition GpuUnhealthy"))
    else:
        world.sick_gpus = (SickGpu(1, "H100", "Xid 79"),)
    first, second = (world.reconcile().node_failures[node] for _ in range(2))
    assert (first.hardware, first.witnessed, first.reason) == (True, witnessed, "GpuUnhealthy")
    assert first.id == second.id, "it is recorded once"


def created(world: World, index: int) -> CreatePods:
    for _ in range(100):
        made = [a for a in world.reconcile().actions if isinstance(a, CreatePods) and index in a.indices]
        if made:
            return made[0]
        world.tick()
    raise AssertionError(f"pod {index} is not made")


def test_pods_are_kept_from_nodes_that_are_avoided() -> None:
    world = World(job().nodes(2).build())
    world.avoided_nodes = ("bad-1",)
    assert created(world, 1).avoid == ("bad-1",)
    world.run("Running")
    world.avoided_nodes = ("bad-2",)
    world.kill(1)
    world.lead()
    assert created(world, 1).avoid == ("bad-2",)


def test_a_preference_for_other_nodes_stands_beside_the_user_s_own() -> None:
    own = {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [own]}, "podAffinity": {}}
    made = prefer_other_nodes(affinity, ["bad-1", "bad-2"])
    assert made["podAffinity"] == {}
    kept, added = made["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert kept == own
    assert [each["values"] for each in added["preference"]["matchFields"]] == [["bad-1"], ["bad-2"]]


def test_a_pod_that_waits_is_placed_anew_once_its_node_is_avoided_no_more() -> None:
    world = World(job().nodes(2).build(), capacity=1)
    world.avoided_nodes, world.nodes["bad-1"] = ("bad-1",), NodeView("bad-1")
    created(world, 1)
    world.tick()
    (waiting,) = [pod for pod in world.pods.values() if not pod.scheduled]
    assert "bad-1" in waiting.avoids
    for _ in range(80):
        world.reconcile()
        world.tick()
    assert world.pods[waiting.name].uid == waiting.uid, "it is avoided still"
    world.avoided_nodes = ()
    for _ in range(5):
        world.reconcile()
        world.tick()
    assert world.pods[waiting.name].uid != waiting.uid


def test_a_pod_that_finds_no_other_node_for_two_minutes_may_run_on_a_bad_one() -> None:
    world = World(job().nodes(2).build(), capacity=1)
    world.avoided_nodes, world.nodes["bad-1"] = ("bad-1",), NodeView("bad-1")
    created(world, 1)
    world.tick()
    (waiting,) = [pod for pod in world.pods.values() if not pod.scheduled]
    for _ in range(130):
        made = world.reconcile()
        world.tick()
    assert world.pods[waiting.name].uid != waiting.uid
    assert world.pods[waiting.name].avoids == frozenset()
    world.capacity = 2
    world.run("Running")
    assert made.status is not None
