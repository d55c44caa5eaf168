"""Gangs of one namespace that share a quota: one of them has all it needs, not each of them half."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest

from everstep_operator.cluster.gangs import gang_view
from everstep_operator.plan import gang
from everstep_operator.plan.actions import Action, CreatePods
from everstep_operator.plan.observed import GangView, Rejection
from everstep_operator.plan.pods import pod_body
from tests.builders import CREATED, job
from tests.plan.world import World


class Namespace:
    """Jobs that share a ResourceQuota of so many pods, which counts pods whether they have a node or not."""

    def __init__(self, quota: int, *nodes: int, capacity: int = 10_000) -> None:
        self.quota = quota
        self.worlds = [self._world(number, wanted, capacity) for number, wanted in enumerate(nodes)]

    def _world(self, number: int, wanted: int, capacity: int) -> World:
        created = (CREATED + timedelta(seconds=number)).strftime("%Y-%m-%dT%H:%M:%SZ")
        built = job(f"job-{number}").nodes(wanted).meta(uid=f"uid-{number}", creationTimestamp=created).build()
        world = World(built, capacity=capacity, now=CREATED.timestamp() + 10)
        world.refuse = lambda action: self._admit(world, action)
        return world

    @property
    def used(self) -> int:
        return sum(len(world.pods) for world in self.worlds)

    def _admit(self, world: World, action: Action) -> Rejection | None:
        if not isinstance(action, CreatePods):
            return None
        for index in action.indices:
            body = pod_body(action.frozen, index, action.epoch, action.leader)
            if body["metadata"]["name"] in world.pods:
                continue
            if self.used >= self.quota:
                return Rejection(action, "Quota", "exceeded quota: pods")
            world._create(body)
        return None

    def step(self) -> None:
        views = [gang_view(world.job, world.pods.values()) for world in self.worlds]
        for world in self.worlds:
            world.gangs = tuple(view for view in views if view is not None and view.uid != world.job.metadata.uid)
            world.reconcile()
        for world in self.worlds:
            world.tick()

    def halve(self) -> None:
        """Both have asked at once: each has got half of the quota."""
        quota, self.quota = self.quota, self.quota // 2
        self.worlds[0].reconcile()
        self.quota = quota
        self.worlds[1].reconcile()
        assert [len(world.pods) for world in self.worlds[:2]] == [quota // 2] * 2

    def seconds_until(self, *phases: str, limit: int) -> int:
        for second in range(limit):
            if tuple(world.phase for world in self.worlds) == phases:
                return second
            self.step()
        raise AssertionError([(world.phase, len(world.pods)) for world in self.worlds])


@pytest.mark.parametrize("capacity", [10_000, 0])
def test_of_two_that_each_hold_half_of_a_quota_the_younger_gives_back(capacity: int) -> None:
    """Pods that have no node hold the quota too."""
    namespace = Namespace(4, 4, 4, capacity=capacity)
    namespace.halve()
    for _ in range(120):
        namespace.step()
    older, younger = namespace.worlds
    assert (len(older.pods), len(younger.pods)) == (4, 0)
    assert younger.phase == "Pending"
    (told,) = [event.message for event in younger.events if event.reason == "GangReleased"]
    assert told.startswith("2 of 4 pods fitted into the namespace's quota")
    if capacity:
        assert older.phase == "Running"


def test_the_younger_runs_when_the_older_is_done() -> None:
    namespace = Namespace(4, 4, 4)
    namespace.halve()
    namespace.seconds_until("Running", "Pending", limit=120)
    older = namespace.worlds[0]
    older.end()
    namespace.seconds_until("Succeeded", "Pending", limit=30)
    older.pods.clear()
    namespace.seconds_until("Succeeded", "Running", limit=400)


def test_the_younger_does_not_come_back_for_what_the_older_waits_for() -> None:
    """A third party has what lacks: until it is given back, the older keeps its pods, and the younger makes no more."""
    namespace = Namespace(4, 4, 4)
    namespace.halve()
    namespace.quota = 3
    made = 0
    younger = namespace.worlds[1]
    for _ in range(240):
        before = {pod.uid for pod in younger.pods.values()}
        namespace.step()
        made += len({pod.uid for pod in younger.pods.values()} - before)
    assert len(namespace.worlds[0].pods) == 3
    assert made == 0
    namespace.quota = 4
    namespace.seconds_until("Running", "Pending", limit=60)


def test_three_behind_one_quota_all_run_in_turn() -> None:
    namespace = Namespace(6, 4, 4, 4)
    for turn in range(3):
        for _ in range(900):
            if namespace.worlds[turn].phase == "Running":
                break
            namespace.step()
        assert namespace.worlds[turn].phase == "Running", turn
        namespace.worlds[turn].end()
        namespace.step()
        namespace.worlds[turn].pods.clear()


def test_an_older_that_wants_more_than_the_quota_keeps_it_from_nobody_for_ever() -> None:
    namespace = Namespace(4, 8, 4)
    namespace.worlds[0].reconcile()
    assert len(namespace.worlds[0].pods) == 4
    namespace.seconds_until("Pending", "Running", limit=900)


def test_gangs_that_wait_for_nodes_have_nothing_to_do_with_a_quota() -> None:
    waits = GangView("team/one", "a", 1.0, frozenset(), wanted=4, scheduled=2)
    blocked = dataclasses.replace(waits, key="team/two", uid="b", quota="team")
    elsewhere = dataclasses.replace(blocked, key="other/three", uid="c", quota="other")
    assert gang.rivals(waits, [blocked, elsewhere]) == []
    assert gang.rivals(blocked, [waits, elsewhere]) == [waits], "it holds nodes that the other wants"
    assert gang.rivals(blocked, [dataclasses.replace(blocked, uid="d", pools=frozenset({"p"}))]) != []
