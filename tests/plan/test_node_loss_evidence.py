"""Evidence of the death of a leader's machine, how many deaths are too many, and pods that are kept from a node."""

from __future__ import annotations

import dataclasses

import pytest

from everstep_operator.api.status import ConditionType
from everstep_operator.plan.affinity import exclude_nodes, is_node_allowed, list_excluded_nodes
from everstep_operator.plan.node_loss import HELD_SECONDS, MAX_SUSPECTS
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import parse_pod
from everstep_operator.plan.pod_replacement import DEATH_KNOWN_SECONDS
from tests.builders import job
from tests.plan.test_node_loss import condition, forced, given_up, required, running
from tests.plan.world import World


def mark(world: World, index: int, **fields: object) -> None:
    """The state of the Lease of the node under a pod."""
    name = str(world.pods[f"digits-{index}"].node)
    known = world.nodes.get(name, NodeView(name))
    world.nodes[name] = dataclasses.replace(known, **fields)  # type: ignore[arg-type]


def assert_nobody_is_replaced_in_silence(world: World) -> None:
    """The kubelet of pod 0 is silent for ten minutes, as its agent is for the operator."""
    mark(world, 0, silent_since=world.now)
    for _ in range(20):
        assert forced(world.reconcile()) == []
        world.now += 30.0
    assert world.status.restarts.total == 0


# --- the leader's machine


def test_a_kubelet_that_restarts_while_the_operator_has_not_reached_the_leader_for_long_costs_nothing() -> None:
    """A NetworkPolicy that came later keeps the operator out; the leader trains on."""
    world = running(4)
    world.leader_reachable = False
    for _ in range(60):
        world.now += 60.0
        mark(world, 0, renewed_at=world.now - 5)
        assert forced(world.reconcile()) == []
    mark(world, 0, silent_since=world.now)
    for _ in range(10):
        world.now += 10.0
        assert forced(world.reconcile()) == []
    assert world.status.restarts.infrastructure == 0
    assert world.phase == "Running"


def test_a_leader_whose_machine_dies_with_the_operator_is_replaced_by_the_next_operator() -> None:
    """The next one never reaches it; the job's status says that the last one did."""
    world = running(4)
    world.silence_node(0)
    world.restart_operator()
    world.reconcile()
    node = world.pods["digits-0"].node
    assert node in world.reconcile().suspects
    world.now += world.settings.fence_timeout - 1
    assert forced(world.reconcile()) == [], "it may stand still for that long"
    world.now += 1
    assert world.status.is_true(ConditionType.DEGRADED)
    assert forced(world.reconcile()) == ["digits-0"]
    world.leader_reachable = True
    world.run("Running")
    assert world.status.restarts.infrastructure == 1


def test_an_operator_that_starts_where_the_one_before_did_not_reach_the_leader_knows_nothing_of_it() -> None:
    world = running(4)
    world.leader_reachable = False
    for _ in range(3):
        world.now += 30.0
        world.reconcile()
    assert world.status.is_true(ConditionType.DEGRADED)
    world.restart_operator()
    assert_nobody_is_replaced_in_silence(world)
    assert world.phase == "Running"


def test_a_leader_that_no_operator_has_reached_in_its_epoch_is_not_taken_for_dead() -> None:
    world = World(job().nodes(2).build())
    world.leader_reachable = False
    world.run("Running", limit=60)
    world.restart_operator()
    assert_nobody_is_replaced_in_silence(world)


def test_of_a_leader_whose_kubelet_has_outlived_it_no_other_lease_is_read() -> None:
    world = running(4)
    world.leader_reachable = False
    world.now += 60.0
    mark(world, 0, renewed_at=world.now)
    assert world.reconcile().suspects == {world.pods["digits-0"].node}


def test_a_leader_s_machine_that_stands_still_for_less_than_the_fence_timeout_costs_nothing() -> None:
    world = running(4)
    world.silence_node(0)
    world.reconcile()
    world.now += world.settings.fence_timeout - 1
    made = world.reconcile()
    assert forced(made) == []
    assert made.requeue_at is not None
    assert made.requeue_at <= world.now + 1
    world.mute.clear()
    world.nodes.clear()
    world.tick()
    assert forced(world.reconcile()) == []
    assert world.status.restarts.total == 0


def test_a_dead_leader_stays_dead_while_strict_fencing_waits_for_its_ranks() -> None:
    world = running(4, fencing="strict")
    world.silence_node(0)
    world.now += world.settings.fence_timeout
    for _ in range(2):
        made = world.reconcile()
        assert forced(made) == []
        assert made.poll is None, "it shall not go on in our name"
        assert condition(world)[0] == "NodeLost"
    world.now += world.settings.fence_timeout
    assert forced(world.reconcile()) == ["digits-0"]
    world.run("Running")
    assert (world.status.epoch, world.status.restarts.infrastructure) == (2, 1)


def test_a_leader_that_thaws_while_strict_fencing_waits_is_asked_again() -> None:
    world = running(4, fencing="strict")
    world.silence_node(0)
    world.now += world.settings.fence_timeout
    assert world.reconcile().poll is None
    world.nodes.clear()
    world.mute.clear()
    assert world.reconcile().poll is not None
    world.run("Running")
    assert world.status.restarts.total == 0


# --- how many are too many


def test_most_nodes_that_are_silent_with_the_leader_s_are_held() -> None:
    world = running(4)
    for index in (0, 1, 2):
        world.silence_node(index)
    world.now += world.settings.fence_timeout
    for _ in range(10):
        assert forced(world.reconcile()) == []
        world.now += 10.0
    assert condition(world)[0] == "Held"


def test_the_first_of_many_that_is_found_silent_is_held_too() -> None:
    """Leases are read one after the other."""
    world = running(4)
    for index in (1, 2, 3):
        world.silence_node(index, lease=False)
        mark(world, index, unrenewed=True)
    mark(world, 1, silent_since=world.now)
    made = world.reconcile()
    assert forced(made) == []
    assert condition(world)[0] == "Held"
    assert made.requeue_at is not None
    assert made.requeue_at <= world.now + HELD_SECONDS, "kubelets of the others may be heard, of which nobody tells"
    mark(world, 2, unrenewed=False)
    mark(world, 3, unrenewed=False)
    world.now += HELD_SECONDS
    assert forced(world.reconcile()) == ["digits-1"]


def test_agents_that_are_silent_beside_renewed_leases_hold_nobody() -> None:
    world = running(4)
    for index in (1, 2, 3):
        world.silence_node(index, lease=index == 1)
    assert forced(world.reconcile()) == ["digits-1"]


def test_most_nodes_of_a_job_of_which_not_all_leases_are_read_are_held() -> None:
    world = running(200)
    for index in range(1, 151):
        world.silence_node(index, lease=False)
    suspects = world.reconcile().suspects
    assert len(suspects) == MAX_SUSPECTS
    world.nodes |= {name: NodeView(name, silent_since=world.now) for name in suspects}
    assert forced(world.reconcile()) == []
    assert condition(world)[0] == "Held"


def test_the_leader_of_a_large_job_is_replaced() -> None:
    world = running(200)
    world.silence_node(0, lease=False)
    suspects = world.reconcile().suspects
    assert world.pods["digits-0"].node in suspects
    assert len(suspects) == MAX_SUSPECTS
    mark(world, 0, silent_since=world.now)
    world.now += world.settings.fence_timeout
    assert forced(world.reconcile()) == ["digits-0"]


def test_a_replacement_that_was_bound_to_a_dead_node_is_replaced_as_well() -> None:
    """A machine that nobody heard of before, because no agent was on it: the rest of a rack without power."""
    world = running(4)
    world.kill(2)
    world.lead()
    while world.pods.get("digits-2") is None or not world.pods["digits-2"].live:
        world.bury()
        world.reconcile()
    world.bind()
    pod = world.pods["digits-2"] = dataclasses.replace(world.pods["digits-2"], node="node-spare")
    assert pod.started_at is None
    assert world.reconcile().suspects == {pod.node}
    mark(world, 2, silent_since=world.now)
    assert forced(world.reconcile()) == ["digits-2"]


def test_a_plain_pod_is_never_forced_out_of_a_node_that_another_job_suspects() -> None:
    """Its ranks may run there, and nobody would fence them."""
    world = World(job().nodes(2).plain().build()).run("Running")
    world.silence_node(1)
    given_up(world, 1)
    for _ in range(10):
        world.now += 100.0
        assert forced(world.reconcile()) == []


# --- pods that are kept from a node


def test_a_pod_that_is_kept_from_a_node_that_is_back_is_made_again_without_that() -> None:
    """On a cluster with just enough nodes it would wait for ever."""
    world = running(4)
    world.capacity = 3
    world.silence_node(2)
    world.lead()
    for _ in range(3):
        world.tick()
        world.reconcile()
    name = next(iter(world.nodes))
    assert world.pods["digits-2"].avoids == {name}
    for away in (NodeView(name, ready=False), NodeView(name, gone_since=world.now)):
        world.nodes[name] = away
        before = world.pods["digits-2"].uid
        made = world.reconcile()
        assert world.pods["digits-2"].uid == before, "the scheduler knows: another affinity would help nobody"
        assert not world.pods["digits-2"].deleting
        assert made.requeue_at is not None
    world.nodes[name] = NodeView(name)
    world.reconcile()
    assert not world.pods["digits-2"].deleting, "it may be dead all the same, and the operator new"
    world.now = world.pods["digits-2"].created + DEATH_KNOWN_SECONDS
    world.reconcile()
    world.capacity = 4
    world.run("Running")
    assert world.pods["digits-2"].avoids == frozenset()
    assert world.status.restarts.infrastructure == 1


def test_what_a_user_s_own_affinity_excludes_is_excluded_for_good() -> None:
    own = required([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n9"]}]}])
    made = {"metadata": {"name": "x"}, "spec": {"affinity": exclude_nodes(own, ["n1"])}}
    assert list_excluded_nodes({"affinity": own}) == {"n9"}
    assert parse_pod(made).avoids == {"n1", "n9"}


@pytest.mark.parametrize("empty", [{}, {"matchExpressions": []}, {"matchFields": None}])
def test_a_term_that_matches_no_node_matches_none_with_dead_nodes_excluded(empty: dict[str, object]) -> None:
    for others in ([], [{"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}]):
        spec = {"affinity": exclude_nodes(required([empty, *others]), ["n1"])}
        assert not is_node_allowed(spec, "n3", {})
