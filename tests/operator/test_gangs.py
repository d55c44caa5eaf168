"""Who is in the queue for nodes, as the other jobs see it: the planner's own opinion."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from everstep_operator.app import Operator
from everstep_operator.cluster.agentcode import AgentCode
from everstep_operator.cluster.client import Page
from everstep_operator.cluster.clock import ServerClock
from everstep_operator.cluster.gangs import gang_view
from everstep_operator.cluster.resources import JOBS
from everstep_operator.plan import gang
from everstep_operator.settings import Settings
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


class Server:
    """Lists jobs, and nothing else."""

    clock = ServerClock()

    def __init__(self, *jobs: Any) -> None:
        self.jobs = list(jobs)

    async def list(self, resource: Any, *_: Any, **__: Any) -> AsyncIterator[Page]:
        yield Page(self.jobs if resource is JOBS else [], 1)


async def test_an_operator_that_has_just_started_knows_who_waits_before_it_plans() -> None:
    world = World(job().nodes(3).build(), capacity=2)
    for _ in range(3):
        world.tick()
        world.reconcile()
    unreadable = job("odd").manifest()
    unreadable["spec"]["numNodes"] = "many"
    server: Any = Server(unreadable, world.job.manifest())
    operator = Operator(Settings.load({}, {}), server, (b"key",), AgentCode(b"code"))
    await operator._first_list()  # what `run` does before it starts its workers
    (seen,) = operator.gangs.others(("default", "another"))
    assert (seen.key, seen.wanted) == ("default/digits", 3)
    assert operator.gangs.others(("default", "digits")) == ()
