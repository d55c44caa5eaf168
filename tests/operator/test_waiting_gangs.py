"""Other jobs see the same jobs in the queue for nodes as the planner of each job does."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from everstep_operator.app import Operator
from everstep_operator.cluster import errors
from everstep_operator.cluster.agent_code import AgentCode
from everstep_operator.cluster.cache import ClusterCache
from everstep_operator.cluster.client import ListPage
from everstep_operator.cluster.node_directory import BURST_SECONDS, NODES_A_SECOND, NodeDirectory
from everstep_operator.cluster.resources import JOBS, NODES
from everstep_operator.cluster.server_clock import ServerClock
from everstep_operator.cluster.waiting_gangs import WaitingGangs, view_waiting_gang
from everstep_operator.plan import gang
from everstep_operator.plan.observation import GangView
from everstep_operator.settings import OperatorSettings
from tests.builders import job
from tests.plan.world import World


def test_a_job_that_lost_a_pod_is_seen_as_one_that_recovers() -> None:
    world = World(job().nodes(3).build()).run("Running")
    assert view_waiting_gang(world.job, world.pods.values()) is None, "it has what it wants"
    world.vanish(1)
    world.reconcile()
    view = view_waiting_gang(world.job, [p for p in world.pods.values() if p.index != 1])
    assert view == gang.make_gang_view(world.job, [p for p in world.pods.values() if p.index != 1])
    assert view is not None
    assert view.recovering


def test_a_job_that_nobody_has_looked_at_yet_takes_no_place() -> None:
    assert view_waiting_gang(job().nodes(3).build(), ()) is None


def test_who_waits_hears_that_another_became_possible_or_impossible() -> None:
    woken: list[Any] = []
    gangs = WaitingGangs(woken.append)
    pools: frozenset[str] = frozenset()
    one = GangView("default/one", "a", 1.0, pools, wanted=4, places=4)
    gangs.update(("default", "one"), one)
    gangs.update(("default", "two"), GangView("default/two", "b", 2.0, pools, wanted=4, scheduled=1, places=4))
    woken.clear()
    gangs.update(("default", "one"), dataclasses.replace(one, scheduled=2))
    assert woken == [("default", "one")], "its own decision follows from its rivals from now on"
    woken.clear()
    gangs.update(("default", "one"), dataclasses.replace(one, scheduled=2, places=3))
    assert woken == [("default", "two")]


def test_a_job_without_a_node_is_not_woken_by_each_of_the_others() -> None:
    """A thousand jobs in a queue would all be looked at whenever one of them begins."""
    woken: list[Any] = []
    gangs = WaitingGangs(woken.append)
    for number in range(100):
        gangs.update(("default", f"{number}"), GangView(f"default/{number}", f"{number}", 1.0, frozenset(), wanted=4))
    given_back = GangView("default/back", "back", 2.0, frozenset(), wanted=4, released_at=5.0)
    gangs.update(("default", "back"), given_back)
    woken.clear()
    gangs.update(("default", "0"), None)
    assert woken == [("default", "back")]


def test_who_waits_hears_that_another_waits_for_a_quota_now_and_not_for_nodes() -> None:
    """It waited for the release of the other, which is no rival now: nobody would tell it so."""
    woken: list[Any] = []
    gangs = WaitingGangs(woken.append)
    one = GangView("default/one", "a", 2.0, frozenset(), wanted=4, scheduled=2)
    gangs.update(("default", "one"), one)
    gangs.update(("other", "two"), GangView("other/two", "b", 1.0, frozenset(), wanted=4, scheduled=2))
    woken.clear()
    gangs.update(("default", "one"), dataclasses.replace(one, quota="default"))
    assert woken == [("other", "two")]


def test_who_waits_hears_that_a_queue_has_let_another_go() -> None:
    """It is a rival from then on."""
    woken: list[Any] = []
    gangs = WaitingGangs(woken.append)
    one = GangView("default/one", "a", 1.0, frozenset(), wanted=4, gated=True)
    gangs.update(("default", "one"), one)
    gangs.update(("other", "two"), GangView("other/two", "b", 2.0, frozenset(), wanted=4, scheduled=2))
    woken.clear()
    gangs.update(("default", "one"), dataclasses.replace(one, gated=False))
    assert woken == [("other", "two")]


def test_a_job_is_seen_as_one_whose_pods_a_queue_keeps_while_it_keeps_one() -> None:
    world = World(job().nodes(2).build(), capacity=0).run("Scheduling")
    pods = [dataclasses.replace(pod, gated=True) for pod in world.pods.values()]
    views = [view_waiting_gang(world.job, each) for each in (pods, world.pods.values())]
    assert [view is not None and view.gated for view in views] == [True, False]


def test_places_are_counted_anew_when_nodes_change_and_not_when_they_beat() -> None:
    cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
    client: Any = None
    nodes, key = NodeDirectory(client, cache, float), ("default", "digits")
    assert nodes.count_places(key, "u", 1, {}, 9) is None, "no node is known yet"
    body: Any = {"metadata": {"name": "n1"}, "status": {"allocatable": {"pods": "1"}}}
    cache.nodes.put(body)
    assert nodes.count_places(key, "u", 1, {}, 9) == 1
    changes = cache.node_changes
    cache.nodes.put({**body, "status": {**body["status"], "images": []}})
    assert cache.node_changes == changes
    cache.nodes.put({**body, "metadata": {"name": "n2"}})
    assert nodes.count_places(key, "u", 1, {}, 9) == 2
    cache.nodes.remove(("", "n1"), "")
    assert nodes.count_places(key, "u", 1, {}, 9) == 1


def test_counting_places_again_costs_no_more_than_a_share_of_the_time() -> None:
    """In a large cluster nodes change all the time, and each waiting job would be counted for on all of them."""
    cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
    client: Any = None
    now = 0.0
    nodes = NodeDirectory(client, cache, float, timer=lambda: now)
    body: Any = {"status": {"allocatable": {"pods": "1"}}}
    for number in range(1000):
        cache.nodes.put({**body, "metadata": {"name": f"n{number}"}})
    jobs = [("default", f"job-{number}") for number in range(50)]
    for job_ in jobs:
        assert nodes.count_places(job_, "u", 1, {}, 5000) == 1000, "the first count is not put off"
    examined = 0
    for step in range(600):
        now += 0.1
        cache.nodes.put({**body, "metadata": {"name": f"more-{step}"}})
        before = nodes.examined
        for job_ in jobs:
            nodes.count_places(job_, "u", 1, {}, 5000)
        examined += nodes.examined - before
    assert examined <= (60 + BURST_SECONDS) * NODES_A_SECOND + 1600
    now += 1000
    for _ in range(50):
        now += 1
        for job_ in jobs:
            nodes.count_places(job_, "u", 1, {}, 5000)
    assert {nodes.count_places(job_, "u", 1, {}, 5000) for job_ in jobs} == {1600}, "all are counted in the end"


def test_jobs_that_always_look_after_others_are_counted_for_again_all_the_same() -> None:
    """An event wakes all of them in one order, and what the first ones leave is not enough for the last ones."""
    cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
    client: Any = None
    now = 0.0
    nodes = NodeDirectory(client, cache, float, timer=lambda: now)
    for number in range(1000):
        body: Any = {"metadata": {"name": f"n{number}"}, "status": {"allocatable": {"pods": "1"}}}
        cache.nodes.put(body)
    jobs = [("default", f"job-{number}") for number in range(200)]
    for key in jobs:
        nodes.count_places(key, "u", 1, {}, 5000)
    cache.nodes.put({"metadata": {"name": "more"}, "status": {"allocatable": {"pods": "1"}}})
    for wake in range(10):
        now += 300
        cache.nodes.put({"metadata": {"name": "changes"}, "status": {"allocatable": {"pods": f"{wake % 2}"}}})
        counts = [nodes.count_places(key, "u", 1, {}, 5000) for key in jobs]
    assert min(count for count in counts if count is not None) >= 1001
    assert nodes.examined <= (10 * 300 + BURST_SECONDS) * NODES_A_SECOND


class Server:
    """Lists jobs and nodes, and has their templates."""

    clock = ServerClock()

    def __init__(self, *jobs: Any, nodes: Any = (), config_maps: Any = ()) -> None:
        self.listed = {JOBS: list(jobs), NODES: list(nodes)}
        self.config_maps = dict(config_maps)

    async def get(self, resource: Any, namespace: str, name: str) -> Any:
        if name not in self.config_maps:
            raise errors.NotFound(404, "NotFound", name)
        return self.config_maps[name]

    async def list(self, resource: Any, *_: Any, **__: Any) -> AsyncIterator[ListPage]:
        yield ListPage(self.listed.get(resource, []), 1)


async def test_an_operator_that_has_just_started_knows_who_waits_before_it_plans() -> None:
    world = World(job().nodes(3).build(), capacity=2)
    for _ in range(3):
        world.tick()
        world.reconcile()
    unreadable = job("odd").manifest()
    unreadable["spec"]["numNodes"] = "many"
    nodes = [{"metadata": {"name": f"n{n}"}, "status": {"allocatable": {"pods": "1"}}} for n in range(2)]
    server: Any = Server(unreadable, world.job.manifest(), nodes=nodes, config_maps=world.config_maps)
    operator = Operator(OperatorSettings.load({}, {}), server, world.settings.operator_keys, AgentCode(b"code"))
    await operator._fill_cache()  # what `run` does before it starts its workers
    (seen,) = operator.gangs.list_views()
    assert (seen.key, seen.wanted) == ("default/digits", 3)
    assert (seen.places, seen.possible) == (2, False), "counted by the frozen template, which is read first"
    assert gang.list_rivals(seen, operator.gangs.list_views()) == []
