"""Agents that fail at every start are told of, made again ever more slowly, and not for ever."""

from __future__ import annotations

import dataclasses

import pytest

from everstep_operator.api.status import Cause, ConditionType
from everstep_operator.plan import start_failures
from everstep_operator.plan.actions import CreatePods, DeletePods, JobEvent
from everstep_operator.plan.observation import INIT_FAILED, ContainerEnd, TerminationMessage
from tests.builders import job
from tests.plan.world import World

PORT = TerminationMessage("left", exit_code=1, message="port 8470 is in use")


def bound(nodes: int = 2) -> World:
    world = World(job().nodes(nodes).build())
    world.reconcile()
    world.now += 1
    world.bind()
    world.start()
    world.reconcile()
    return world


def again(world: World, *indices: int, word: TerminationMessage | None = PORT) -> float:
    """The agents fail; time passes until their pods are made again and started. Returns how long that took."""
    since = world.now
    for index in indices:
        world.exit(index, 1, word=word)
    while any(world.pods[f"digits-{index}"].ended is not None for index in indices):
        made = world.reconcile()
        assert world.phase != "Failed"
        assert made.requeue_at is not None
        world.now = made.requeue_at
        world.reconcile()
        world.bury()
        if any(isinstance(a, CreatePods) for a in world.reconcile().actions):
            world.bind()
            world.start()
    return world.now - since


def test_the_status_says_which_pod_where_and_what_its_agent_said() -> None:
    world = bound()
    world.exit(1, 1, word=PORT)
    made = world.reconcile()
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.reason, failure.cause, failure.node) == ("StartFailed", Cause.INFRASTRUCTURE, "node-1")
    said = "digits-1 on node-1: the agent failed at its start (1 of 5 times in a row): port 8470 is in use"
    assert failure.message == said
    ready = world.status.condition(ConditionType.READY)
    assert ready is not None
    assert (ready.reason, ready.message) == ("StartFailed", said)
    assert JobEvent("Warning", "StartFailed", said) in made.events
    assert not any(e.reason == "StartFailed" for e in world.reconcile().events), "once"


@pytest.mark.parametrize("exit_code", [1, 120, 127])
def test_an_init_container_that_fails_each_time_ends_the_job_with_its_words(exit_code: int) -> None:
    world = World(job().nodes(2).build())
    for _ in range(200):
        world.reconcile()
        if world.phase == "Failed":
            break
        world.bury()
        world.bind()
        for name, pod in world.pods.items():
            if pod.scheduled and pod.live:
                end = ContainerEnd(exit_code, None, INIT_FAILED, "init container fetch failed: no bucket", world.now)
                world.pods[name] = dataclasses.replace(pod, ended=end, phase="Failed")
        world.now += 5
    assert world.phase == "Failed"
    assert world.status.transitions[-1].reason == "StartFailed"
    said = "the pod failed at its start (5 of 5 times in a row): init container fetch failed: no bucket"
    assert said in world.status.conditions[0].message


def fail_init_containers(world: World) -> None:
    for name, pod in world.pods.items():
        if pod.scheduled and pod.live and pod.started_at is None:
            end = ContainerEnd(1, None, INIT_FAILED, "init container everstep-restore failed: no store", world.now)
            world.pods[name] = dataclasses.replace(pod, ended=end, phase="Failed")


@pytest.mark.parametrize("index", [0, 1])
def test_a_job_that_has_trained_outlives_what_its_init_containers_wait_for(index: int) -> None:
    """As a store that is unavailable for a quarter of an hour, in which a pod is lost."""
    world = World(job().nodes(2).build()).run("Running")
    world.vanish(index)
    since = world.now
    while world.now < since + 900:
        world.now += 5
        world.lead()
        world.reconcile()
        world.bury()
        world.bind()
        fail_init_containers(world)
        assert world.phase != "Failed", world.status.transitions[-1]
    if index == 0:
        assert world.status.start_failures is not None
        assert 5 < world.status.start_failures.count < 25, "ever more slowly"
        assert "times in a row): init container everstep-restore failed" in world.status.conditions[0].message
    world.run("Running")
    assert world.status.restarts.total == 1
    assert world.status.start_failures is None


def test_a_job_that_is_resumed_outlives_it_too() -> None:
    world = World(job().nodes(1).build()).run("Running")
    world.tick()
    world.edit(suspend=True)
    world.run("Suspended")
    world.edit(suspend=False)
    for _ in range(60):
        world.now += 5
        world.reconcile()
        world.bury()
        world.bind()
        fail_init_containers(world)
    assert world.status.start_failures is not None
    world.run("Running")


def fail_at_a_hook(world: World, node: str = "") -> None:
    """A node, or each, starts no container: its GPU driver is broken. Kubelets tell a start in 1970 then."""
    said = "OCI runtime create failed: nvidia-container-cli: initialization error: driver not loaded"
    for name, pod in world.pods.items():
        if pod.scheduled and pod.live and pod.started_at is None and node in ("", pod.node):
            end = ContainerEnd(128, None, "StartError", said, world.now)
            world.pods[name] = dataclasses.replace(pod, ended=end, phase="Failed")


@pytest.mark.parametrize("index", [0, 1])
def test_a_job_that_has_trained_outlives_a_node_that_starts_no_container(index: int) -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.vanish(index)
    made, since = set(), world.now
    while world.now < since + 900:
        world.now += 1
        world.lead()
        world.reconcile()
        world.bury()
        world.bind()
        fail_at_a_hook(world)
        made |= {pod.uid for pod in world.pods.values() if pod.index == index}
        assert world.phase == "Restarting", world.status.transitions[-1]
    assert world.status.template is not None
    assert not world.status.template.plain
    assert 5 < len(made) < 25, "ever more slowly"
    assert "driver not loaded" in world.status.conditions[0].message
    world.run("Running")
    assert world.status.restarts.total == 1
    assert world.status.start_failures is None


@pytest.mark.parametrize("together", [False, True])
def test_what_a_job_has_outlived_does_not_count_against_its_agent(together: bool) -> None:
    """Another pod of the same attempt, or the one of the next attempt, is on a node where the agent cannot listen."""
    world = World(job().nodes(3).build()).run("Running")
    world.vanish(1)
    world.vanish(2)
    for _ in range(600):
        world.now += 1
        world.lead()
        world.reconcile()
        world.bury()
        world.bind()
        fail_at_a_hook(world)
    assert world.status.start_failures is not None
    assert world.status.start_failures.count > start_failures.MAX_START_FAILURES
    if not together:
        world.bury()
        world.now += 61
        world.reconcile()
        world.bury()
        world.reconcile()
        world.bind()
        world.start()
    pod = world.pods["digits-1"]
    end = ContainerEnd(1, None, "Error", "", world.now, PORT)
    world.pods["digits-1"] = dataclasses.replace(pod, started_at=world.now, ended=end)
    world.reconcile()
    assert world.phase == "Restarting", world.status.conditions[0].message
    if not together:
        assert world.status.start_failures.count == 1
    world.run("Running")


def test_a_job_that_is_resumed_keeps_its_agent_on_a_node_that_starts_no_container() -> None:
    world = World(job().nodes(1).build()).run("Running")
    world.tick()
    world.edit(suspend=True)
    world.run("Suspended")
    world.edit(suspend=False)
    for _ in range(60):
        world.now += 5
        world.reconcile()
        world.bury()
        world.bind()
        fail_at_a_hook(world)
    world.run("Running")
    assert world.status.template is not None
    assert not world.status.template.plain


def test_the_next_attempt_prefers_other_nodes_than_that_of_the_last() -> None:
    world = World(job().nodes(2).build())
    world.reconcile()
    world.bind()
    bad = world.pods["digits-1"].node
    assert bad is not None
    fail_at_a_hook(world, bad)
    shunned: list[tuple[str, ...]] = []
    for _ in range(30):
        made = world.reconcile()
        shunned += [action.shun for action in made.actions if isinstance(action, CreatePods)]
        world.bury()
        world.now += 1
    assert shunned == [(bad,)]


def test_the_pause_grows_from_attempt_to_attempt() -> None:
    world = bound()
    pauses = [again(world, 1) for _ in range(4)]
    assert [round(pause, -1) for pause in pauses] == [10, 20, 40, 60]


def test_the_fifth_in_a_row_ends_the_job_with_the_last_words() -> None:
    world = bound()
    for _ in range(start_failures.MAX_START_FAILURES - 1):
        again(world, 1)
    world.exit(1, 1, word=PORT)
    made = world.reconcile()
    assert world.phase == "Failed"
    assert world.status.transitions[-1].reason == "StartFailed"
    assert "(5 of 5 times in a row): port 8470 is in use" in world.status.conditions[0].message
    gone = [ref.name for a in made.actions if isinstance(a, DeletePods) for ref in a.pods]
    assert gone == ["digits-0"], "the failed pod keeps its log"


def test_pods_that_fail_together_are_one_failure() -> None:
    world = bound(nodes=20)
    for index in range(20):
        world.exit(index, 1, word=PORT)
        world.reconcile()
    assert world.status.start_failures is not None
    assert world.status.start_failures.count == 1
    again(world, *range(20))
    for index in range(20):
        world.exit(index, 1, word=PORT)
        world.reconcile()
    assert world.status.start_failures.count == 2


def test_they_are_in_a_row_only_until_ranks_run() -> None:
    world = bound()
    again(world, 1)
    world.run("Running")
    assert world.status.start_failures is None


def test_a_replacement_in_a_job_that_has_run_is_counted_too() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.vanish(1)
    world.lead()
    world.reconcile()
    world.bind()
    world.start()
    world.exit(1, 1, word=PORT)
    world.reconcile()
    assert world.status.start_failures is not None
    assert world.status.restarts.total == 1, "charged is the generation that the lost pod ended"
    assert world.phase == "Restarting"


def test_an_agent_without_a_last_word_is_described_by_its_container() -> None:
    world = bound()
    world.exit(0, 139)
    world.reconcile()
    assert world.status.last_failure is not None
    assert "Error, exit code 139" in world.status.last_failure.message


def test_an_agent_that_was_told_to_leave_has_not_failed() -> None:
    world = bound()
    world.exit(1, 143, word=TerminationMessage("left", exit_code=143))
    world.reconcile()
    assert world.status.start_failures is None


def test_a_killed_operator_counts_no_attempt_twice() -> None:
    world = bound()
    world.exit(1, 1, word=PORT)
    for _ in range(3):
        world.reconcile()
        world.now += 0.5
    assert world.status.start_failures is not None
    assert world.status.start_failures.count == 1
