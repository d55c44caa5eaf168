"""Limits of time end a job, and their clocks stand still when the job cannot help it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep_operator.api.status import ConditionType
from everstep_operator.plan import make_plan
from everstep_operator.plan.actions import CreatePods, DryRun, StopLeader
from everstep_operator.plan.rejection import Rejection
from tests.builders import job
from tests.plan.world import World


def reason(world: World) -> str:
    return world.status.transitions[-1].reason


def test_pending_counts_from_creation_until_all_pods_have_a_node() -> None:
    world = World(job().nodes(2).timeouts(pending="5m").build(), capacity=1)
    world.run("Failed", limit=310, step=5)
    assert reason(world) == "PendingTimeout"
    world.tick()
    assert not [p for p in world.pods.values() if p.live]


@pytest.mark.parametrize(("fields", "named"), [({}, "default-scheduler"), ({"schedulerName": "volcano"}, "volcano")])
def test_a_scheduler_that_says_nothing_for_a_minute_is_named(fields: dict[str, str], named: str) -> None:
    """As one that nobody has installed: it is no want of nodes, and no scheduler says so."""
    world = World(job().nodes(2).pod(**fields).build(), capacity=0)
    world.run("Scheduling")
    made = world.reconcile()
    assert made.requeue_at is not None
    assert made.requeue_at <= world.now + 60
    assert named not in world.status.conditions[0].message
    world.now += 60
    world.reconcile()
    assert "no scheduler has said anything of digits-0" in world.status.conditions[0].message
    assert named in world.status.conditions[0].message


def test_a_scheduler_has_a_minute_from_when_a_queue_has_let_a_pod_go() -> None:
    world = World(job().nodes(2).build(), capacity=0)
    world.run("Scheduling")
    world.now += 3600
    let_go_at = world.now
    for seconds in (0, 59, 60):
        world.now = let_go_at + seconds
        made = make_plan(replace(world.observe(), gated_at=let_go_at), world.now)
        assert made.status is not None
        assert ("no scheduler has said anything" in made.status.conditions[0].message) is (seconds == 60)


@pytest.mark.parametrize("has_run", [False, True])
def test_pending_does_not_count_while_a_queue_keeps_pods_from_the_scheduler(has_run: bool) -> None:
    """It may keep them over a weekend, also those of a job that it has evicted."""
    world = World(job().nodes(2).timeouts(pending="5m", startup="1m").build(), capacity=2 if has_run else 0)
    world.run("Running" if has_run else "Scheduling")
    if has_run:
        world.capacity = 0
        world.delete(1)
        world.run("Restarting")
    world.now += 3600
    let_go_at = world.now
    ends = []
    for seconds in (0, 299, 361):
        world.now = let_go_at + seconds
        made = make_plan(replace(world.observe(), gated_at=let_go_at), world.now)
        ends.append(made.status is not None and made.status.transitions[-1].reason == "PendingTimeout")
    assert ends == [False, False, True]


def test_a_job_that_a_queue_has_evicted_does_not_run_meanwhile() -> None:
    """It may keep it over a weekend, and a job may run for a day by default."""
    world = World(job().nodes(2).timeouts(pending="7d", runtime="2h").build()).run("Running")
    world.now += 3600
    for index in range(2):
        world.delete(index, disruption="WorkloadEvictedDueToPreempted")
    world.capacity = 0
    world.reconcile()
    world.bury()
    world.reconcile()
    world.pods = {name: replace(pod, gated=True) for name, pod in world.pods.items()}
    for _ in range(60):
        world.reconcile()
        world.now += 3600
    assert world.phase == "Scheduling"
    world.pods = {name: replace(pod, gated=False) for name, pod in world.pods.items()}
    world.capacity = 2
    world.run("Running")
    assert [(c.id, c.cause.value) for c in world.status.restarts.charges] == [("1.1", "Preemption")]
    world.now += 3500
    world.reconcile()
    assert world.phase == "Running"
    world.run("Stopping", limit=200)
    assert world.status.transitions[-1].reason == "RuntimeTimeout"


def test_pending_starts_anew_after_a_resume() -> None:
    world = World(job().timeouts(pending="5m").suspended().build())
    world.reconcile()
    world.now += 3600
    world.edit(suspend=False)
    world.run("Running")


def test_startup_counts_until_the_ranks_are_started() -> None:
    world = World(job().nodes(2).timeouts(startup="2m").build())
    world.reconcile()
    world.tick()  # bound, but the image never comes
    world.reconcile()
    assert world.phase == "Starting"
    world.now += 119
    world.reconcile()
    assert world.phase == "Starting"
    world.now += 1
    world.reconcile()
    assert reason(world) == "StartupTimeout"


def test_runtime_stops_the_ranks_with_their_grace_first() -> None:
    world = World(job().nodes(2).timeouts(runtime="1h").build()).run("Running")
    world.now += 3600
    made = world.reconcile()
    assert world.phase == "Stopping"
    assert [a for a in made.actions if isinstance(a, StopLeader)]
    assert all(p.live for p in world.pods.values())
    world.reconcile()
    assert world.phase == "Failed", "the leader says that it has stopped"
    assert reason(world) == "RuntimeTimeout"


def test_a_leader_that_does_not_stop_is_not_waited_for_longer_than_its_grace() -> None:
    world = World(job().nodes(2).timeouts(runtime="1h").build()).run("Running")
    world.leader_reachable = False
    world.now += 3600
    world.reconcile()
    assert world.leader is not None
    world.leader.outcome = None
    world.now += 136
    world.reconcile()
    assert world.phase == "Failed"


def test_a_job_that_completes_while_it_is_stopped_has_succeeded() -> None:
    world = World(job().timeouts(runtime="1h").build()).run("Running")
    world.now += 3600
    world.reconcile()
    assert world.leader is not None
    world.leader.outcome = None
    world.end()
    world.reconcile()
    assert world.phase == "Succeeded"


def test_runtime_does_not_count_suspension() -> None:
    world = World(job().timeouts(runtime="1h").build()).run("Running")
    world.now += 1800
    world.reconcile()
    world.edit(suspend=True)
    world.run("Suspended")
    world.now += 7200
    world.edit(suspend=False)
    world.run("Running")
    world.now += 1700
    world.reconcile()
    assert world.phase == "Running"
    world.now += 200
    world.reconcile()
    assert world.phase == "Stopping"


def test_the_plan_says_when_the_next_limit_is_due() -> None:
    world = World(job().timeouts(runtime="5m").build()).run("Running")
    made = world.reconcile()
    assert made.requeue_at == world.status.transitions[-1].start.timestamp() + 300


def test_replacements_that_never_hold_do_not_restart_forever() -> None:
    world = World(job().nodes(2).timeouts(pending="10m", startup="5m").build()).run("Running")
    began = world.now
    while world.phase != "Failed":
        assert world.now < began + 1200
        world.vanish(1)
        world.now += 5
        world.lead()
        world.reconcile()
    assert reason(world) == "PendingTimeout"


def away(world: World, seconds: float) -> None:
    """An operator that comes after a time in which there was none: it has asked nobody yet."""
    world.now += seconds
    world.asked = world.answered_at = None


@pytest.mark.parametrize("restarting", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_ranks_that_start_while_no_operator_is_there_have_started(plain: bool, restarting: bool) -> None:
    builder = job().nodes(2).timeouts(startup="2m", pending="5m")
    world = World((builder.spec(command=None) if plain else builder).build())
    if restarting:
        world.run("Running")
        world.vanish(1)
        world.reconcile()
    else:
        world.reconcile()
    for _ in range(10):  # until all pods are bound, and not one look more
        if world.phase in ("Starting", "Restarting") and len([p for p in world.pods.values() if p.scheduled]) == 2:
            break
        world.tick(1)
        world.reconcile()
    for _ in range(20):  # they start, and nobody looks
        world.tick(1)
        world.lead()
    leader, world.leader = world.leader, None
    away(world, 3600)
    made = world.reconcile()
    assert made.actions == () or not [each for each in made.actions if isinstance(each, StopLeader)]
    assert world.phase in ("Starting", "Restarting", "Running")
    world.leader = leader
    world.run("Running", limit=30)


def test_a_job_that_nobody_looked_at_has_all_of_its_time() -> None:
    world = World(job().nodes(2).timeouts(pending="5m").build(), capacity=1)
    away(world, 3600)
    world.reconcile()
    assert world.phase != "Failed"
    began = world.now
    world.run("Failed", limit=400, step=5)
    assert reason(world) == "PendingTimeout"
    assert 300 <= world.now - began <= 310


def test_a_job_that_gives_its_nodes_back_again_and_again_waits_as_long_as_it_may() -> None:
    world = World(job().nodes(2).timeouts(pending="6h").build()).run("Running")
    world.now += 36_000
    world.capacity = 1
    world.vanish(1)
    began = world.now
    while world.phase != "Failed":
        world.tick(30)
        world.reconcile()
    assert reason(world) == "PendingTimeout"
    assert 6 * 3600 <= world.now - began <= 6.2 * 3600


def hold_up(world: World, name: str, why: str) -> None:
    world.pods[name] = replace(world.pods[name], container_wait=why)


def test_a_pod_whose_image_does_not_come_is_told_at_once_and_once() -> None:
    world = World(job().nodes(3).timeouts(startup="2m").build())
    world.reconcile()
    world.tick()
    hold_up(world, "digits-1", 'ImagePullBackOff Back-off pulling image "nobody/has:it"')
    hold_up(world, "digits-2", "ErrImagePull not found")
    made = world.reconcile()
    ready = world.status.condition(ConditionType.READY)
    assert ready is not None
    assert (world.phase, ready.status, ready.reason) == ("Starting", "False", "ContainerWaiting")
    assert ready.message.startswith("digits-1 (and 1 more) cannot start: ImagePullBackOff Back-off pulling")
    assert [event.reason for event in made.events if event.type == "Warning"] == ["ContainerWaiting"]
    hold_up(world, "digits-1", "ErrImagePull not found")
    assert world.reconcile().events == ()
    world.now += 120
    world.reconcile()
    failure = world.status.condition(ConditionType.FAILED)
    assert failure is not None
    assert failure.message == (
        "not all ranks started in 120 s: digits-1 (and 1 more) cannot start: ErrImagePull not found"
    )


def test_a_pod_whose_image_comes_after_all_starts_as_any_other() -> None:
    world = World(job().nodes(2).build())
    world.reconcile()
    world.tick()
    hold_up(world, "digits-1", 'CreateContainerConfigError secret "later" not found')
    world.reconcile()
    hold_up(world, "digits-1", "")
    world.run("Running")
    ready = world.status.condition(ConditionType.READY)
    assert ready is not None
    assert ready.reason == "Running"


def test_a_replacement_whose_image_does_not_come_is_told_and_what_was_lost_stays_its_charge() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.vanish(1)
    world.lead()
    world.reconcile()
    world.bind()
    name = next(pod.name for pod in world.pods.values() if pod.index == 1)
    lost = world.status.transitions[-1].reason
    hold_up(world, name, "ImagePullBackOff the registry denies access")
    made = world.reconcile()
    ready = world.status.condition(ConditionType.READY)
    assert ready is not None
    assert (world.phase, ready.reason) == ("Restarting", "ContainerWaiting")
    assert [event.reason for event in made.events if event.type == "Warning"] == ["ContainerWaiting"]
    assert world.status.transitions[-1].reason == lost, "the restart is charged by it"
    assert world.reconcile().events == ()
    hold_up(world, name, "")
    world.reconcile()
    ready = world.status.condition(ConditionType.READY)
    assert ready is not None
    assert ready.reason == lost
    assert "denies" not in ready.message
    world.run("Running")


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_job_that_has_trained_outlives_a_registry_that_is_unavailable(plain: bool, resumed: bool) -> None:
    builder = job().nodes(2).timeouts(startup="5m", pending="1h")
    world = World((builder.spec(command=None) if plain else builder).build()).run("Running")
    if resumed:
        world.tick()
        world.edit(suspend=True)
        world.run("Suspended")
        world.edit(suspend=False)
    else:
        world.vanish(1)
    for _ in range(180):
        world.now += 10
        world.lead()
        world.reconcile()
        world.bury()
        world.bind()
        for name in [pod.name for pod in world.pods.values() if pod.started_at is None]:
            hold_up(world, name, "ImagePullBackOff the registry is unavailable")
        assert world.phase in ("Scheduling", "Starting", "Restarting"), world.status.transitions[-1]
    for name in world.pods:
        hold_up(world, name, "")
    world.run("Running")


def test_what_a_replacement_waits_for_in_vain_ends_its_job_after_both_limits() -> None:
    world = World(job().nodes(2).timeouts(startup="5m", pending="10m").build()).run("Running")
    world.vanish(1)
    began = world.now
    while world.phase != "Failed":
        assert world.now < began + 1000
        world.now += 10
        world.lead()
        world.reconcile()
        world.bind()
        hold_up(world, "digits-1", "ImagePullBackOff the registry denies access")
    assert world.now >= began + 900
    assert "digits-1 cannot start: ImagePullBackOff the registry denies access" in world.status.conditions[0].message


def test_a_container_that_waits_hides_no_rejection_of_another_replacement() -> None:
    """While a replacement is rejected, timeouts.pending does not count: that goes by the reason on record."""
    world = World(job().nodes(3).build()).run("Running")
    world.vanish(1)
    world.vanish(2)
    world.lead()
    world.reconcile()
    world.bind()
    hold_up(world, "digits-1", "ImagePullBackOff the registry denies access")
    world.vanish(2)
    said = 'admission webhook "images" denied the request: unsigned'
    world.refuse = lambda action: (
        Rejection(action, "Webhook", said) if isinstance(action, DryRun | CreatePods) else None
    )
    world.reconcile()
    world.reconcile()
    ready = world.status.condition(ConditionType.READY)
    assert ready is not None
    assert (reason(world), ready.reason) == ("AdmissionRejected", "AdmissionRejected")
