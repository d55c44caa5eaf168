"""A node that is announced to go away costs no step: a checkpoint, then its pods leave, for elsewhere and for free."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import pytest

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Cause, ConditionType, Disruption
from everstep_operator.plan.actions import DeletePods, JobPlan, RequestCheckpoint
from everstep_operator.plan.node_notices import AHEAD_SECONDS, LEAVE_SECONDS
from everstep_operator.plan.node_signals import NodeSignal
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import ContainerEnd
from everstep_operator.plan.pod_replacement import explain_loss
from tests.builders import job
from tests.plan.world import OperatorDied, World

NOTICE = 120.0
SPOT = NodeSignal(Reason.SPOT_INTERRUPTION, "taint aws-node-termination-handler/spot-itn", NOTICE)
CORDONED = NodeSignal(Reason.NODE_DRAINING, "cordoned")


def running(nodes: int = 3, **restart: object) -> World:
    world = World(job().nodes(nodes).restart(infrastructure=0, **restart).build()).run("Running")
    world.train(95)
    pass_time(world, 5)
    return world


def deleted(made: JobPlan) -> list[str]:
    return [ref.name for a in made.actions if isinstance(a, DeletePods) for ref in a.pods]


def asked(made: JobPlan) -> list[RequestCheckpoint]:
    return [a for a in made.actions if isinstance(a, RequestCheckpoint)]


def record(world: World) -> Disruption:
    found = world.status.disruption
    assert found is not None
    return found


def pass_time(world: World, seconds: float, step: float = 1.0) -> None:
    until = world.now + seconds
    while world.now < until:
        world.tick(min(step, until - world.now))
        world.reconcile()


def put_on_record(world: World) -> JobPlan:
    """Let the operator see what is announced; return the plan that follows from its record."""
    assert not world.reconcile().actions, "nothing follows before it is on record"
    return world.reconcile()


def until_left(world: World, limit: float = NOTICE) -> None:
    """Until the pods on the noticed nodes are told to go."""
    deadline = world.now + limit
    while record(world).leaving is None:
        assert world.now < deadline, "nobody leaves"
        world.tick()
        world.reconcile()


def test_a_notice_is_on_record_before_the_leader_is_asked_once_for_a_checkpoint() -> None:
    world = running()
    world.notice(1, SPOT)
    made = put_on_record(world)
    known = record(world)
    assert (known.reason, known.source, known.nodes) == ("SpotInterruption", SPOT.source, ["node-1"])
    assert known.deadline is not None
    assert known.deadline.timestamp() == world.now + NOTICE
    (request,) = asked(made)
    assert request.deadline == world.now + NOTICE
    assert not deleted(made)
    assert asked(world.reconcile()) == [], "it has had it"
    assert world.asked_for == [(request.id, request.deadline)]
    told = world.status.condition(ConditionType.NODES_HEALTHY)
    assert told is not None
    assert (told.status, told.reason) == ("False", "SpotInterruption")
    assert told.message.startswith("digits-1 is on node-1, which goes away by 2026-01-01T12:")


def test_pods_leave_once_the_checkpoint_is_committed_and_no_step_is_lost() -> None:
    world = running()
    node = world.notice(1, SPOT)
    kept = {name: pod.uid for name, pod in world.pods.items() if name != "digits-1"}
    noticed = world.now
    world.reconcile()
    until_left(world)
    assert world.now < noticed + 10, "nobody waits for the deadline"
    assert record(world).saved_step == world.checkpoint >= 99
    world.run("Restarting", limit=5)
    event = next(e for e in world.events if e.reason == "SpotInterruption" and "committed" in e.message)
    assert event.message.startswith(f"node {node} goes away by 2026-01-01T12:")
    assert f"the checkpoint of step {world.checkpoint} is committed" in event.message
    world.run("Running", limit=30)
    assert {name: pod.uid for name, pod in world.pods.items() if name != "digits-1"} == kept, "survivors stay"
    assert world.pods["digits-1"].node != node
    assert world.leader is not None
    assert world.leader.step >= world.checkpoint
    world.reconcile()
    assert world.status.disruption is None, "it is over"


def test_the_restart_is_charged_once_to_pre_emption_which_no_budget_pays() -> None:
    world = running()
    world.notice(1, SPOT)
    world.reconcile()
    until_left(world)
    world.run("Restarting", limit=5).run("Running", limit=30)
    pass_time(world, 60)
    restarts = world.status.restarts
    assert (restarts.total, restarts.preemption, restarts.infrastructure) == (1, 1, 0)
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.reason, failure.cause) == ("SpotInterruption", Cause.PREEMPTION)


@pytest.mark.parametrize("reason", [Reason.SPOT_INTERRUPTION, Reason.NODE_MAINTENANCE, Reason.SCALE_DOWN])
def test_the_leaders_node_goes_like_any_other_under_a_new_epoch(reason: Reason) -> None:
    world = running()
    node = world.notice(0, dataclasses.replace(SPOT, reason=reason))
    world.reconcile()
    until_left(world)
    world.run("Restarting", limit=5).run("Running", limit=30)
    assert world.status.epoch == 2
    assert world.pods["digits-0"].node != node
    assert world.status.restarts.preemption == world.status.restarts.total == 1
    assert world.status.last_failure is not None
    assert world.status.last_failure.reason == reason.value


def test_all_noticed_nodes_are_left_in_one_restart() -> None:
    world = running(4)
    for index in (1, 2, 3):
        world.notice(index, SPOT)
    made = put_on_record(world)
    assert len(asked(made)) == 1
    until_left(world)
    world.run("Restarting", limit=5).run("Running", limit=60)
    assert world.status.restarts.total == world.status.restarts.preemption == 1


def test_a_node_that_is_noticed_later_has_its_say_about_the_deadline() -> None:
    world = running()
    world.saves_in = None
    world.notice(1, SPOT)
    put_on_record(world)
    world.tick(50)
    world.notice(2, dataclasses.replace(SPOT, seconds=40))
    made = world.reconcile()
    known = record(world)
    assert known.deadline is not None
    assert known.deadline.timestamp() == world.now + 40
    assert known.nodes == ["node-1", "node-2"]
    assert asked(made) == [], "the checkpoint that is asked for serves both"


def test_a_notice_that_is_withdrawn_before_the_pods_left_costs_nothing() -> None:
    world = running()
    world.saves_in = None
    pods = {pod.uid for pod in world.pods.values()}
    world.notice(1, SPOT)
    world.reconcile()
    pass_time(world, 20)
    world.nodes.clear()
    made = world.reconcile()
    assert world.status.disruption is None
    assert [(e.type, e.reason) for e in made.events] == [("Normal", "NoticeWithdrawn")]
    pass_time(world, NOTICE)
    assert {pod.uid for pod in world.pods.values()} == pods
    assert (world.phase, world.status.restarts.total, world.status.generation) == ("Running", 0, 1)


@pytest.mark.parametrize(("seconds", "margin"), [(120.0, LEAVE_SECONDS), (600.0, LEAVE_SECONDS), (15.0, 3.75)])
def test_without_a_checkpoint_pods_leave_shortly_before_the_deadline_and_say_so(seconds: float, margin: float) -> None:
    """No library is in use, or the save takes longer than the notice."""
    world = running()
    world.saves_in = None
    world.notice(1, dataclasses.replace(SPOT, seconds=seconds))
    made = put_on_record(world)
    at = world.now + seconds - margin
    assert made.requeue_at is not None
    assert made.requeue_at <= at
    world.now = at - 0.1
    assert not deleted(world.reconcile())
    world.now = at
    assert deleted(world.reconcile()) == ["digits-1"]
    world.run("Restarting", limit=5)
    assert any("no checkpoint was committed in time" in e.message for e in world.events)
    world.run("Running", limit=30)
    assert world.status.restarts.preemption == world.status.restarts.total == 1


def test_a_checkpoint_of_before_the_notice_is_not_the_one_that_is_asked_for() -> None:
    world = running()
    world.save()
    world.train(7)
    world.saves_in = 5.0
    world.notice(1, SPOT)
    world.reconcile()
    world.tick()
    world.reconcile()
    assert record(world).saved_step is None
    until_left(world)
    assert record(world).saved_step == world.checkpoint >= 106


def test_an_operator_that_has_just_started_does_not_take_an_old_checkpoint_for_the_new_one() -> None:
    world = running()
    world.save()
    world.train(50)
    world.notice(1, SPOT)
    world.restart_operator()
    made = world.reconcile()
    assert asked(made) == []
    assert not deleted(made), "ranks may run, though nobody hears the leader"
    world.leader_reachable = True
    made = world.reconcile()
    assert len(asked(made)) == 1
    assert not deleted(made)
    until_left(world)
    assert record(world).saved_step is not None
    assert world.checkpoint >= 149


def test_ranks_that_do_not_run_are_not_waited_for() -> None:
    world = running()
    world.fail_rank()
    world.reconcile()
    world.notice(1, SPOT)
    made = world.reconcile()
    made = world.reconcile()
    assert deleted(made) == ["digits-1"]
    world.run("Running", limit=30)
    assert world.pods["digits-1"].node != "node-1"


def test_a_pod_that_starts_on_a_noticed_node_leaves_at_once() -> None:
    world = World(job().nodes(2).build())
    world.run("Scheduling")
    world.bind()
    world.notice(1, SPOT)
    world.reconcile()
    assert deleted(world.reconcile()) == ["digits-1"]
    world.run("Running", limit=60)
    assert world.pods["digits-1"].node != "node-1"
    assert world.status.restarts.total == 0


def test_replacements_exclude_the_node_though_they_tolerate_its_taint() -> None:
    world = running(2)
    world.notice(1, SPOT)
    world.reconcile()
    until_left(world)
    world.bury()
    world.reconcile()
    assert world.pods["digits-1"].avoids == {"node-1"}
    world.capacity = 1
    pass_time(world, 90)
    assert world.pods["digits-1"].avoids == {"node-1"}, "the node still goes away"
    waiting = world.pods["digits-1"].uid
    world.nodes["node-1"] = NodeView("node-1")
    pass_time(world, 20)
    assert world.pods["digits-1"].uid != waiting
    assert world.pods["digits-1"].avoids == frozenset(), "it stays after all"


def test_of_a_node_that_stays_a_checkpoint_is_asked_for_and_no_more() -> None:
    world = running()
    pods = {pod.uid for pod in world.pods.values()}
    world.notice(1, CORDONED)
    assert len(asked(put_on_record(world))) == 1
    pass_time(world, 900, step=10)
    assert {pod.uid for pod in world.pods.values()} == pods
    assert record(world).saved_step == world.checkpoint > 0
    assert len(world.asked_for) == 1
    world.notice(1, SPOT)  # whoever has cordoned it goes on
    put_on_record(world)
    assert len(world.asked_for) == 2
    until_left(world)


def test_a_node_that_is_cordoned_long_after_another_asks_for_a_checkpoint_of_its_own() -> None:
    world = running()
    world.notice(1, CORDONED)
    pass_time(world, 30)
    world.notice(2, CORDONED)
    pass_time(world, 900, step=10)
    assert len(world.asked_for) == 1, "those of a volley share one"
    first = record(world).saved_step
    world.notice(0, CORDONED)
    pass_time(world, 900, step=10)
    assert len(world.asked_for) == 2
    saved = record(world).saved_step
    assert saved is not None
    assert first is not None
    assert saved > first
    assert len(record(world).nodes) == 3


def test_an_end_that_is_far_away_is_told_and_waited_for() -> None:
    world = running()
    at = world.now + 7200
    world.notice(1, NodeSignal(Reason.NODE_MAINTENANCE, "label maintenance", deadline=at))
    made = world.reconcile()
    assert asked(made) == []
    assert made.requeue_at is not None
    assert made.requeue_at <= at - AHEAD_SECONDS
    told = world.status.condition(ConditionType.NODES_HEALTHY)
    assert told is not None
    assert told.reason == "NodeMaintenance"
    assert "by 2026-01-01T14:00" in told.message
    world.now = at - AHEAD_SECONDS + 1
    world.reconcile()
    assert len(asked(world.reconcile())) == 1


def test_somebody_who_evicts_the_pod_first_changes_nothing_about_who_pays() -> None:
    world = running()
    world.saves_in = None
    world.notice(1, SPOT)
    world.reconcile()
    world.delete(1, disruption="EvictionByEvictionAPI")
    world.reconcile()
    world.run("Running", limit=30)
    assert world.status.restarts.preemption == world.status.restarts.total == 1
    assert world.pods["digits-1"].node != "node-1"


def test_a_machine_that_is_gone_before_its_deadline_is_the_provider_s_as_announced() -> None:
    world = running()
    world.saves_in = None
    world.notice(1, SPOT)
    world.reconcile()
    world.vanish(1)
    world.nodes["node-1"] = NodeView("node-1", gone_since=world.now)
    world.reconcile()
    world.run("Running", limit=30)
    assert world.status.restarts.preemption == world.status.restarts.total == 1


def test_another_pod_that_is_lost_meanwhile_is_charged_as_ever() -> None:
    world = World(job().nodes(3).restart(infrastructure=5).build()).run("Running")
    world.saves_in = None
    world.notice(1, SPOT)
    world.reconcile()
    world.kill(2)
    world.lead()
    world.reconcile()
    world.run("Running", limit=30)
    assert world.status.restarts.infrastructure == world.status.restarts.total == 1


def test_a_plain_job_leaves_before_the_deadline_as_a_whole() -> None:
    world = World(job().nodes(2).plain().restart(infrastructure=0).build()).run("Running")
    world.notice(1, SPOT)
    assert asked(world.reconcile()) == []
    world.now += NOTICE - LEAVE_SECONDS
    assert deleted(world.reconcile()) == ["digits-1"]
    world.run("Restarting", limit=5).run("Running", limit=60)
    assert world.status.restarts.preemption == world.status.restarts.total == 1


def test_over_crds_that_cannot_hold_the_record_nothing_follows() -> None:
    """Each look would be the first, and ask for a checkpoint of its own."""
    world = running()
    world.notice(1, SPOT)
    for _ in range(5):
        made = world.reconcile()
        assert not made.actions
        assert world.phase == "Running"
        world.job = world.job.model_copy(update={"status": world.status.model_copy(update={"disruption": None})})
        world.tick()
    told = world.status.condition(ConditionType.NODES_HEALTHY)
    assert told is not None
    assert told.reason == "SpotInterruption"


def test_a_suspended_or_finished_job_leaves_no_node() -> None:
    world = running()
    world.notice(1, SPOT)
    world.reconcile()
    world.edit(suspend=True)
    world.run("Suspended")
    assert world.status.disruption is None


@pytest.mark.parametrize("reason", ["Terminated", "NodeShutdown"])
def test_a_kubelet_that_shuts_down_on_a_spot_machine_is_the_providers_notice(reason: str) -> None:
    """GKE gives no other sign than this one."""
    pod = running().pods["digits-1"]
    ended = dataclasses.replace(pod, ended=ContainerEnd(None, None, reason, "", None))
    assert explain_loss(dataclasses.replace(ended, on_spot=True)) is Reason.SPOT_INTERRUPTION
    assert explain_loss(ended) is Reason.EVICTED


@pytest.mark.parametrize("die_after", range(4))
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("index", [0, 1])
def test_an_operator_that_is_killed_anywhere_on_the_way_leaves_the_same_nodes_once(
    index: int, at: int, die_after: int
) -> None:
    """In reconcile number `at` after the notice, so many actions after its status write."""
    world = running()
    node = world.notice(index, SPOT)
    for number in range(at):
        if number:
            world.tick()
        world.reconcile()
    with suppress(OperatorDied):
        world.reconcile(die_after=die_after)
    world.restart_operator()
    world.leader_reachable = True
    world.tick()
    world.reconcile()
    deadline = world.now + NOTICE
    while world.status.disruption is not None or world.phase != "Running":
        assert world.now < deadline
        world.tick()
        world.reconcile()
    assert len({name for name, _ in world.asked_for}) == 1
    assert world.pods[f"digits-{index}"].node != node
    assert world.checkpoint >= 99
    restarts = world.status.restarts
    assert (restarts.total, restarts.preemption) == (1, 1)


def test_a_leader_that_cannot_say_whose_pod_was_lost_tells_of_the_one_that_left() -> None:
    """Its entry may come while the pod's object is still there."""
    world = running()
    world.notice(1, SPOT)
    world.reconcile()
    until_left(world)
    assert world.leader is not None
    assert world.pods["digits-1"].deleting
    world.leader.end_generation("PodLost", world.now)
    world.reconcile()
    restarts = world.status.restarts
    assert (restarts.total, restarts.preemption) == (1, 1)
    assert world.phase == "Restarting"
