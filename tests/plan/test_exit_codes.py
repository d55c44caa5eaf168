"""Exit codes may end a job or cost nothing (`restart.onExitCodes`); progress makes budgets whole (`resetAfter`)."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from everstep_operator.plan.actions import CreatePods
from everstep_operator.plan.observation import INIT_FAILED, ContainerEnd
from tests.builders import job
from tests.plan.world import World


def running(nodes: int = 2, **restart: object) -> World:
    return World(job().nodes(nodes).restart(**restart).build()).run("Running")


def rules(*pairs: tuple[list[int], str]) -> list[dict[str, object]]:
    return [{"codes": codes, "action": action} for codes, action in pairs]


def train(world: World, step: int) -> None:
    assert world.leader is not None
    world.leader.step = step
    world.reconcile()


def allowance(world: World) -> int:
    made = world.reconcile().poll
    assert made is not None
    return made.allowance


def test_a_fatal_exit_code_fails_the_job_whatever_is_left_of_the_budget() -> None:
    world = running(application=3, onExitCodes=rules(([42], "Fail")))
    world.fail_rank(exit_code=42)
    world.run("Failed")
    assert world.status.transitions[-1].reason == "FatalExitCode"
    complete = world.status.conditions[0]
    assert "code 42" in complete.message
    assert world.status.restarts.total == 0, "no restart came of it"
    assert world.status.last_failure is not None
    assert world.status.last_failure.exit_code == 42


def test_an_exit_code_that_is_ignored_restarts_as_often_as_it_comes() -> None:
    world = running(application=1, onExitCodes=rules(([75, 76], "Ignore"), ([1], "Retry")))
    for _ in range(5):
        world.fail_rank(exit_code=75)
        world.run("Running")
    assert (world.status.restarts.total, world.status.restarts.ignored, world.status.restarts.application) == (5, 5, 0)
    assert allowance(world) == 1, "the leader may still restart once for what is paid"
    world.fail_rank(exit_code=1)
    world.run("Running")
    world.fail_rank(exit_code=1)
    world.run("Failed")
    assert world.status.transitions[-1].reason == "RestartBudgetExceeded"


def test_the_first_rule_that_lists_a_code_decides() -> None:
    world = running(application=3, onExitCodes=rules(([3], "Retry"), ([3, 4], "Fail")))
    world.fail_rank(exit_code=3)
    world.run("Running")
    world.fail_rank(exit_code=4)
    world.run("Failed")
    assert world.status.transitions[-1].reason == "FatalExitCode"


def test_what_was_killed_for_memory_has_chosen_no_exit_code() -> None:
    world = running(application=3, onExitCodes=rules(([137], "Fail")))
    world.fail_rank(exit_code=137, cause="OutOfMemory")
    world.run("Running")
    assert world.status.restarts.application == 1


def test_a_fatal_exit_that_only_a_termination_message_tells_of_fails_the_job_too() -> None:
    """The operator was away, and the leader's process has ended since."""
    world = running(application=3, onExitCodes=rules(([42], "Fail")))
    world.fail_rank(exit_code=42)
    world.leader_reachable = False
    world.run("Failed")
    assert world.status.transitions[-1].reason == "FatalExitCode"


def test_progress_for_long_enough_makes_the_budget_whole() -> None:
    world = running(application=1, window="1d", resetAfter="10m")
    train(world, 100)
    world.fail_rank()
    world.run("Running")
    train(world, 100)
    assert world.status.restarts.progress_since is None, "it has only come as far as before"
    train(world, 101)
    assert allowance(world) == 0
    world.now += 599
    assert allowance(world) == 0
    world.now += 1
    assert allowance(world) == 1
    world.fail_rank()
    world.run("Running")
    assert world.status.restarts.application == 2
    assert allowance(world) == 0, "and again it has to be earned"
    assert world.status.restarts.trained_step == 101


@pytest.mark.parametrize("step", [0, 50, 100])
def test_steps_that_were_made_before_are_no_progress(step: int) -> None:
    world = running(application=1, window="1d", resetAfter="1s")
    train(world, 100)
    world.fail_rank()
    world.run("Running")
    train(world, step)
    world.now += 3600
    world.fail_rank()
    world.run("Failed")
    assert world.status.transitions[-1].reason == "RestartBudgetExceeded"


def test_progress_that_was_interrupted_begins_anew() -> None:
    world = running(application=2, window="1d", resetAfter="10m")
    world.fail_rank()
    world.run("Running")
    train(world, 10)
    world.now += 300
    world.fail_rank()
    world.run("Running")
    train(world, 11)
    world.now += 400
    assert allowance(world) == 0
    world.now += 200
    assert allowance(world) == 2


@pytest.mark.parametrize(("minutes", "left"), [(1, 0), (11, 1)])
def test_time_in_which_a_job_is_suspended_is_no_progress(minutes: int, left: int) -> None:
    world = running(application=1, window="28d", resetAfter="10m")
    world.fail_rank()
    world.run("Running")
    train(world, 100)
    world.now += 60 * minutes
    world.edit(suspend=True)
    world.run("Suspended")
    world.now += 24 * 3600
    world.edit(suspend=False)
    world.run("Running")
    assert allowance(world) == left
    assert world.status.restarts.application == 1


@pytest.mark.parametrize("index", [0, 1])
def test_of_plain_pods_that_fail_in_one_second_the_code_that_has_a_rule_decides(index: int) -> None:
    plain = job().nodes(2).plain().restart(application=3, onExitCodes=rules(([42], "Fail"))).build()
    world = World(plain).run("Running")
    world.exit(index, 42)
    world.exit(1 - index, 1)
    world.reconcile()
    assert world.phase == "Failed"
    assert world.status.transitions[-1].reason == "FatalExitCode"


def test_an_init_container_of_a_plain_pod_is_not_the_applications_fault() -> None:
    """Its exit code is not the program's, which has not run."""
    plain = job().nodes(2).plain().restart(application=0, onExitCodes=rules(([42], "Fail"))).build()
    world = World(plain)
    made_at: list[float] = []
    for _ in range(40):
        world.tick()
        made = world.reconcile()
        made_at += [world.now for action in made.actions if isinstance(action, CreatePods)]
        if len(made_at) > 3:
            break
        for name, pod in world.pods.items():
            if pod.index == 1 and pod.scheduled and pod.live:
                end = ContainerEnd(42, None, INIT_FAILED, "init container fetch failed: no bucket", world.now)
                world.pods[name] = dataclasses.replace(pod, ended=end, phase="Failed")
    restarts = world.status.restarts
    assert (restarts.application, restarts.infrastructure) == (0, restarts.total)
    assert restarts.total >= 3
    assert {charge.reason for charge in restarts.charges} == {"StartFailed"}
    assert world.status.last_failure is not None
    assert "no bucket" in world.status.last_failure.message
    pauses = [after - before for before, after in itertools.pairwise(made_at)]
    assert pauses == sorted(pauses), "each one waits longer"
    assert pauses[-1] > pauses[0]
    world.run("Running")


def test_without_a_reset_only_the_window_counts_and_nothing_is_kept_for_it() -> None:
    world = running(application=1, window="1d")
    train(world, 1)
    world.fail_rank()
    world.run("Running")
    train(world, 1000)
    world.now += 7200
    assert allowance(world) == 0
    assert (world.status.restarts.trained_step, world.status.restarts.progress_since) == (None, None)
