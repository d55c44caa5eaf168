"""Limits of time end a job, and their clocks stand still when the job cannot help it."""

from __future__ import annotations

from everstep_operator.plan.actions import StopLeader
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
    world = World(job().timeouts(runtime="1h").build()).run("Running")
    made = world.reconcile()
    assert made.requeue_at == world.status.transitions[-1].start.timestamp() + 3600


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
