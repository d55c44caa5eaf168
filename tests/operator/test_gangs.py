"""Who is in the queue for nodes, as the other jobs see it: the planner's own opinion."""

from __future__ import annotations

from everstep_operator.cluster.gangs import gang_view
from everstep_operator.plan import gang
from tests.builders import job
from tests.plan.world import World


def test_a_job_that_lost_a_pod_is_seen_as_one_that_recovers() -> None:
    world = World(job().nodes(3).build()).run("Running")
    assert gang_view(world.job, world.pods.values()) is None, "it has what it wants"
    world.vanish(1)
    world.reconcile()
    view = gang_view(world.job, [p for p in world.pods.values() if p.index != 1])
    assert view == gang.view(world.job, [p for p in world.pods.values() if p.index != 1])
    assert view is not None
    assert view.recovering


def test_a_job_that_nobody_has_looked_at_yet_takes_no_place() -> None:
    assert gang_view(job().nodes(3).build(), ()) is None
