"""A PodDisruptionBudget keeps the set whole, and is never what a drain waits for in the end."""

from __future__ import annotations

import random

import pytest

from everstep_operator.api.reasons import Reason
from everstep_operator.plan import disruption_budget
from everstep_operator.plan.actions import DeleteBudget, EnsureBudget
from everstep_operator.plan.disruption_budget import HOLD_SECONDS
from everstep_operator.plan.node_notices import AHEAD_SECONDS
from everstep_operator.plan.node_signals import NodeSignal
from everstep_operator.plan.observation import BudgetView
from everstep_operator.plan.plan_settings import PlanSettings
from tests.builders import JobBuilder, job
from tests.plan.guarded_world import GuardedWorld
from tests.plan.world import OperatorDied

SPOT = NodeSignal(Reason.SPOT_INTERRUPTION, "taint aws-node-termination-handler/spot-itn", 120.0)
THEIRS = BudgetView("digits", "theirs", "", 1)


def running(built: JobBuilder | None = None) -> GuardedWorld:
    world = GuardedWorld((built or job().nodes(3)).build()).run("Running")
    world.train(50)
    pass_time(world, 3)
    return world


def pass_time(world: GuardedWorld, seconds: float) -> None:
    for _ in range(int(seconds)):
        world.tick()
        world.reconcile()


def test_a_set_gets_a_budget_of_all_its_pods_once_all_have_nodes() -> None:
    world = GuardedWorld(job().nodes(3).build(), capacity=2)
    pass_time(world, 10)
    assert world.phase == "Scheduling"
    assert world.budget is None, "a set that is not complete may have to give its nodes back"
    world.capacity = 3
    world.run("Running")
    assert world.budget == BudgetView("digits", "budget-1", world.job.metadata.uid, 3)
    made = world.reconcile()
    assert not [a for a in made.actions if isinstance(a, EnsureBudget | DeleteBudget)], "it is there"


def test_the_budget_selects_the_pods_of_the_job_and_goes_with_it() -> None:
    world = GuardedWorld(job().nodes(2).build())
    world.run("Starting")
    seen = []
    world._act = lambda action: seen.append(action)  # type: ignore[method-assign]
    world.budget = None
    world.reconcile()
    (body,) = [a.body for a in seen if isinstance(a, EnsureBudget)]
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("TrainingJob", world.job.metadata.uid, True)
    assert body["spec"] == {
        "minAvailable": 2,
        "selector": {"matchLabels": {"everstep.dev/job": "digits"}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def test_without_the_setting_there_is_none() -> None:
    world = GuardedWorld(job().nodes(2).build())
    world.settings = PlanSettings()
    world.run("Running")
    assert world.budget is None


def test_an_eviction_from_a_node_that_is_not_drained_is_rejected() -> None:
    world = running()
    for _ in range(100):
        assert not world.evict(1)
        pass_time(world, 1)
    assert world.status.restarts.total == 0


def test_a_drain_waits_for_the_checkpoint_and_ends() -> None:
    world = running()
    before = world.checkpoint
    assert world.drain(1) < 30
    assert world.rejected, "it had to wait"
    assert world.checkpoint > before, "the ranks have saved"
    world.run("Running", limit=60)
    pass_time(world, 3)
    assert world.budget is not None, "the set is guarded again"
    assert world.pods["digits-1"].node != "node-1"
    assert (world.status.restarts.preemption, world.status.restarts.infrastructure) in {(0, 1), (1, 0)}


def test_a_drain_of_ranks_that_do_not_save_ends_in_bounded_time() -> None:
    world = running()
    world.saves_in = None
    assert HOLD_SECONDS <= world.drain(1) <= HOLD_SECONDS + 10


def test_drains_of_all_nodes_one_after_the_other_end() -> None:
    world = running()
    for index in (0, 1, 2):
        assert world.drain(index) < 60
        world.run("Running", limit=60)
        pass_time(world, 3)
        assert world.budget is not None


def test_a_drain_of_a_set_without_the_agent_ends_at_once() -> None:
    world = GuardedWorld(job().plain().nodes(2).build()).run("Running")
    assert world.budget is not None
    assert world.drain(1) < 10


def test_a_drain_ends_whenever_the_operator_dies_on_its_way() -> None:
    for at in range(4):
        world = running()
        world.cordon(1)
        pass_time(world, 1)
        assert world.status.disruption is not None
        for _ in range(2):
            world.tick()
            with pytest.raises(OperatorDied):
                world.reconcile(die_after=at)
        world.restart_operator()
        world.leader_reachable = True
        assert world.drain(1) <= HOLD_SECONDS + 30


def test_a_node_that_is_uncordoned_is_guarded_again() -> None:
    world = running()
    node = world.cordon(1)
    pass_time(world, 10)
    assert world.budget is None
    world.uncordon(node)
    pass_time(world, 2)
    assert world.budget is not None
    assert world.status.restarts.total == 0


def test_a_drain_waits_for_its_checkpoint_though_another_node_is_cordoned_for_long() -> None:
    world = running()
    world.cordon(1)
    pass_time(world, 900)
    asked = len(world.asked_for)
    world.cordon(2)
    pass_time(world, 1)
    assert not world.evict(2), "the ranks have not saved"
    assert world.drain(2) <= 30
    assert len(world.asked_for) == asked + 1


def test_maintenance_that_is_days_away_opens_nothing() -> None:
    world = running()
    far = NodeSignal(
        Reason.NODE_MAINTENANCE,
        "label cloud.google.com/scheduled-maintenance-time",
        deadline=world.now + AHEAD_SECONDS + 86_400,
    )
    world.notice(1, far)
    pass_time(world, 60)
    assert world.budget is not None


def test_a_spot_notice_is_left_by_the_operators_own_deletion_whatever_the_budget_says() -> None:
    world = running()
    node = world.notice(1, SPOT)
    world.run("Restarting", limit=60).run("Running", limit=60)
    assert world.pods["digits-1"].node != node
    assert world.rejected == 0
    pass_time(world, 3)
    assert world.budget is not None


@pytest.mark.parametrize("end", ["suspended", "ended"])
def test_the_budget_goes_with_the_pods(end: str) -> None:
    world = running()
    if end == "suspended":
        world.edit(suspend=True)
        world.run("Suspended", limit=60)
    else:
        world.end()
        world.run("Succeeded", limit=60)
    world.reconcile()
    assert world.budget is None


def test_an_operator_that_dies_between_the_end_and_the_deletion_leaves_it_to_the_next() -> None:
    world = running()
    world.end()
    with pytest.raises(OperatorDied):
        world.reconcile(die_after=0)
    assert world.phase == "Succeeded"
    assert world.budget is not None
    world.reconcile()
    assert world.budget is None


def test_a_budget_of_somebody_else_with_that_name_is_left_alone() -> None:
    world = GuardedWorld(job().nodes(2).build())
    world.budget = THEIRS
    world.run("Running")
    world.edit(suspend=True)
    world.run("Suspended", limit=60)
    assert world.budget == THEIRS


def test_a_budget_that_somebody_has_changed_is_made_again() -> None:
    world = running()
    assert world.budget is not None
    world.budget = BudgetView("digits", "budget-1", world.budget.owner, 1)
    world.reconcile()
    assert world.budget is None
    world.reconcile()
    assert world.budget is not None
    assert world.budget.min_available == 3


@pytest.mark.parametrize("seed", range(40))
def test_in_a_storm_no_budget_outlives_its_use_and_no_drain_hangs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disruption_budget, "HOLD_SECONDS", hold := 20.0)
    chance = random.Random(seed)
    world = running(job().nodes(4).restart(application=99, infrastructure=99, maxBackoff="0s"))
    world.saves_in = chance.choice([2.0, None])
    cordoned: dict[str, float] = {}
    for _ in range(400):
        match chance.randrange(12):
            case 0:
                world.fail_rank()
            case 1:
                world.vanish(chance.randrange(4))
            case 2 if len(cordoned) < 2 and (pod := world.pods.get(f"digits-{chance.randrange(4)}")) and pod.node:
                cordoned.setdefault(world.cordon(pod.index), world.now)
            case 3 if cordoned and chance.random() < 0.3:
                node = chance.choice(sorted(cordoned))
                del cordoned[node]
                world.uncordon(node)
            case 4:
                world.restart_operator()
                world.leader_reachable = True
        for node in cordoned:
            for pod in [pod for pod in world.pods.values() if pod.node == node]:
                world.evict(pod.index)
        world.tick(chance.choice([1.0, 5.0]))
        world.reconcile()
        for node, since in cordoned.items():
            waits = [pod for pod in world.pods.values() if pod.node == node and not pod.deleting]
            assert not waits or world.now <= since + hold + 10, (seed, node)
    for node in cordoned:
        world.uncordon(node)
    pass_time(world, 120)
    assert world.phase == "Running"
    assert world.budget is not None
    world.end()
    world.run("Succeeded", limit=60)
    world.reconcile()
    assert world.budget is None
