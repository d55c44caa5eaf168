"""Every restart is charged once, to the one who caused it, and budgets end the job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from everstep_operator.api.restart import RestartPolicy
from everstep_operator.api.status import MAX_CHARGES, Cause, Charge, Restarts
from everstep_operator.plan.actions import LeaderPoll
from everstep_operator.plan.observation import TerminationMessage
from tests.builders import job
from tests.plan.world import World


def running(nodes: int = 3, **restart: object) -> World:
    return World(job().nodes(nodes).restart(**restart).build()).run("Running")


def counts(world: World) -> tuple[int, int, int]:
    restarts = world.status.restarts
    return restarts.application, restarts.infrastructure, restarts.preemption


def poll(world: World) -> LeaderPoll:
    made = world.reconcile().poll
    assert made is not None
    return made


def test_a_failing_rank_costs_one_application_restart_in_the_same_pods() -> None:
    world = running()
    before = {p.uid for p in world.pods.values()}
    world.fail_rank()
    world.reconcile()
    assert world.phase == "Restarting"
    assert counts(world) == (1, 0, 0)
    world.run("Running")
    assert {p.uid for p in world.pods.values()} == before
    assert world.status.generation == 2


def test_the_leader_is_told_what_was_charged_and_what_is_left() -> None:
    world = running(application=3)
    assert (poll(world).charged, poll(world).allowance) == ("", 3)
    world.fail_rank()
    assert (poll(world).charged, poll(world).allowance) == ("1.1", 2)


def test_budgets_are_counted_in_a_window() -> None:
    world = running(application=1, window="1h")
    world.fail_rank()
    assert poll(world).allowance == 0
    world.run("Running")
    world.now += 3601
    assert poll(world).allowance == 1


def test_a_leader_hears_at_once_that_a_restart_counts_no_more() -> None:
    """A program that tells of no steps, fails each 21 minutes, and is allowed two failures an hour."""
    world = running(application=2, window="1h")
    for minutes in (0, 21):
        world.now += 60 * minutes
        world.fail_rank()
        world.run("Restarting")
        world.run("Running")
    oldest, newest = (charge.time.timestamp() for charge in world.status.restarts.charges)
    for expiry, left in ((oldest + 3600, 0), (newest + 3600, 1)):
        world.now = expiry - 100
        world.reconcile()
        assert (poll(world).allowance, world.reconcile().requeue_at) == (left, expiry)
        world.now = expiry
        assert poll(world).allowance == left + 1


def test_a_leader_hears_at_once_that_progress_makes_its_budget_whole() -> None:
    world = running(application=1, resetAfter="5m")
    world.fail_rank()
    world.run("Restarting")
    world.run("Running")
    for _ in range(10):
        world.tick()
        world.reconcile()
    since = world.status.restarts.progress_since
    assert since is not None
    world.now = since.timestamp() + 280
    world.reconcile()
    assert (poll(world).allowance, world.reconcile().requeue_at) == (0, since.timestamp() + 300)
    world.now = since.timestamp() + 300
    assert poll(world).allowance == 1


def test_a_spent_application_budget_fails_the_job_and_says_why() -> None:
    world = running(application=1)
    world.fail_rank()
    world.run("Running")
    world.fail_rank(exit_code=3)
    world.run("Failed")
    assert world.status.transitions[-1].reason == "RestartBudgetExceeded"
    assert world.status.last_failure is not None
    assert (world.status.last_failure.exit_code, world.status.last_failure.message) == (3, "ValueError: no")


@pytest.mark.parametrize("edit", [RestartPolicy(application=1), RestartPolicy(application=2, window=timedelta(days=1))])
def test_a_budget_that_is_edited_counts_from_the_next_failure_on(edit: RestartPolicy) -> None:
    world = running(application=3, window="10m")
    for _ in range(3):
        world.fail_rank()
        world.run("Restarting")
        world.run("Running")
        world.now += 250
    world.edit(restart=edit)
    world.reconcile()
    assert (world.phase, poll(world).allowance) == ("Running", 0)
    world.kill(1)
    world.run("Restarting")
    world.run("Running")
    world.fail_rank()
    world.run("Failed")
    assert world.status.transitions[-1].reason == "RestartBudgetExceeded"


def test_without_any_allowance_the_reason_is_the_error_itself() -> None:
    world = running(application=0)
    world.fail_rank()
    world.run("Failed")
    assert world.status.transitions[-1].reason == "ApplicationError"


@pytest.mark.parametrize(
    ("disruption", "reason", "expected"),
    [
        (None, "PodDeleted", (0, 1, 0)),
        ("EvictionByEvictionAPI", "Evicted", (0, 1, 0)),
        ("DeletionByTaintManager", "NodeLost", (0, 1, 0)),
        ("PreemptionByScheduler", "Preempted", (0, 0, 1)),
        ("WorkloadEvictedDueToPreempted", "Preempted", (0, 0, 1)),
    ],
)
def test_a_lost_pod_is_paid_by_whoever_took_it(
    disruption: str | None, reason: str, expected: tuple[int, int, int]
) -> None:
    world = running()
    world.delete(1, disruption=disruption)
    world.pods["digits-1"] = world.pods["digits-1"]
    world.kill(1)
    world.lead()
    world.reconcile()
    assert counts(world) == expected
    assert world.status.last_failure is not None
    assert world.status.last_failure.reason == reason
    world.run("Running")
    assert sum(counts(world)) == 1


@pytest.mark.parametrize("cause", ["Leaving", "PodLost"])
@pytest.mark.parametrize("leader_first", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    ("disruption", "reason", "expected"),
    [
        (None, "PodDeleted", (0, 1, 0)),
        ("EvictionByEvictionAPI", "Evicted", (0, 1, 0)),
        ("PreemptionByScheduler", "Preempted", (0, 0, 1)),
    ],
)
def test_a_pod_that_is_gone_before_the_survivors_have_stopped_is_paid_by_whoever_took_it(
    *,
    cause: str,
    leader_first: bool,
    replaced: bool,
    restarted: bool,
    disruption: str | None,
    reason: str,
    expected: tuple[int, int, int],
) -> None:
    """Survivors hang in collectives until they are killed; the lost pod's object goes with its own ranks."""
    world = running()
    world.tick(60)
    assert world.leader is not None
    if leader_first:
        world.leader.phase = "stopping"
        world.reconcile()
    world.delete(1, disruption=disruption)
    world.reconcile()
    world.leader.phase = "stopping"
    world.reconcile()
    world.now += 2
    world.bury()
    if restarted:
        world.restart_operator()
    if replaced:
        world.reconcile()
        world.bind()
        world.start()
    world.now += 6
    world.leader.end_generation(cause, world.now, index=1)
    world.leader_reachable = True
    world.run("Running")
    assert counts(world) == expected
    assert world.status.last_failure is not None
    assert world.status.last_failure.reason == reason
    assert world.status.last_failure.node is None, "the replacement's node has done nothing"


def test_a_loss_that_was_charged_says_nothing_of_the_next() -> None:
    world = running()
    world.delete(1, disruption="PreemptionByScheduler")
    world.reconcile()
    assert world.leader is not None
    world.leader.end_generation("Leaving", world.now, index=1)
    world.reconcile()
    assert counts(world) == (0, 0, 1)
    world.bury()
    world.reconcile()
    world.tick()
    world.tick()
    world.tick()  # the next generation runs, and nobody looks
    assert world.leader.phase == "running"
    world.vanish(1)
    world.lead()
    world.run("Running")
    assert counts(world) == (0, 1, 1)


def test_a_container_killed_for_memory_is_the_programs_own() -> None:
    world = running()
    world.kill(2, reason="OOMKilled")
    world.run("Restarting")
    world.run("Running")
    assert counts(world) == (1, 0, 0)
    assert world.status.last_failure is not None
    assert world.status.last_failure.reason == "OutOfMemory"


@pytest.mark.parametrize(
    ("disruption", "exit_code", "expected"),
    [
        ("PreemptionByScheduler", 143, (1, 0, 1)),
        ("EvictionByEvictionAPI", 143, (1, 1, 0)),
        ("PreemptionByScheduler", 137, (1, 0, 1)),  # its grace was over before the agent had ended
    ],
)
def test_a_rank_that_was_killed_for_memory_once_makes_no_later_end_of_its_pod_another_one(
    disruption: str, exit_code: int, expected: tuple[int, int, int]
) -> None:
    """Runtimes say OOMKilled of each end of such a container, though its ranks were started again in place."""
    world = running(application=1)
    world.fail_rank(137, cause="OutOfMemory")
    world.run("Running")
    assert counts(world) == (1, 0, 0)
    world.delete(2, disruption=disruption)
    world.now += 5
    word = TerminationMessage("left", epoch=1, generation=2, exit_code=143) if exit_code == 143 else None
    world.exit(2, exit_code, word=word, reason="OOMKilled")
    world.run("Restarting")
    world.run("Running")
    assert counts(world) == expected


def test_a_lost_leader_is_charged_although_its_history_is_gone() -> None:
    world = running()
    world.kill(0)
    world.run("Restarting")
    assert counts(world) == (0, 1, 0)
    world.run("Running")
    assert counts(world) == (0, 1, 0)
    assert [c.id for c in world.status.restarts.charges] == ["1.1"]


def test_a_leader_lost_after_its_generation_was_charged_costs_nothing_more() -> None:
    world = running()
    world.fail_rank()
    world.reconcile()
    world.kill(0)
    world.run("Running")
    assert counts(world) == (1, 0, 0)


def test_what_happened_while_no_operator_ran_is_charged_as_the_leader_tells_it() -> None:
    world = running()
    world.fail_rank()
    world.now += 60
    world.restart_operator()
    world.delete(2, disruption="PreemptionByScheduler")
    world.reconcile()
    assert counts(world) == (0, 0, 0), "nobody has asked the leader yet"
    world.leader_reachable = True
    world.reconcile()
    assert counts(world) == (1, 0, 0)
    assert [c.id for c in world.status.restarts.charges] == ["1.1"]


def test_losing_all_pods_at_once_is_one_restart() -> None:
    world = running(4)
    for index in range(4):
        world.vanish(index)
    world.run("Restarting")
    world.run("Running")
    assert counts(world) == (0, 1, 0)


def test_a_spent_infrastructure_budget_fails_the_job_and_removes_the_survivors() -> None:
    world = running(infrastructure=1)
    for _ in range(2):
        world.kill(1)
        world.run("Failed" if world.status.restarts.infrastructure else "Restarting")
        if world.phase == "Restarting":
            world.run("Running")
    assert world.status.transitions[-1].reason == "InfrastructureBudgetExceeded"
    world.tick()
    assert not [p for p in world.pods.values() if p.live]


def test_counts_never_go_back_beyond_what_the_list_holds() -> None:
    world = running(1, application=1000)
    for number in range(100):
        world.fail_rank()
        world.tick()
        world.reconcile()
        assert world.status.restarts.application == number + 1
    assert len(world.status.restarts.charges) <= 64


def test_a_vague_loss_waits_for_the_pods_own_word_but_not_forever() -> None:
    world = running()
    assert world.leader is not None
    world.leader.end_generation("PodLost", world.now, index=1)
    made = world.reconcile()
    assert counts(world) == (0, 0, 0)
    assert made.requeue_at == world.now + 10
    world.now += 10
    world.reconcile()
    assert counts(world) == (0, 1, 0)


def test_old_restarts_of_one_cause_are_never_counted_as_new_because_another_fills_the_list() -> None:
    """Weeks of one application failure each five hours, and a lost pod a day."""
    hour = timedelta(hours=1)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    restarts, charged = Restarts(), list[tuple[Cause, datetime]]()
    for number in range(24 * 60):
        now = start + number * hour
        for cause, each in ((Cause.APPLICATION, 5), (Cause.INFRASTRUCTURE, 24), (Cause.PREEMPTION, 7)):
            if number % each == 0:
                charged.append((cause, now))
                restarts = restarts.charge(Charge(id=f"1.{len(charged)}", cause=cause, time=now))
        for cause in (Cause.APPLICATION, Cause.INFRASTRUCTURE):
            for window in (hour, 24 * hour):
                true = sum(time > now - window for other, time in charged if other is cause)
                assert restarts.within(cause, now - window) == true
    assert len(restarts.charges) == MAX_CHARGES
