"""Gangs of one namespace that share a quota: one of them has all it needs, not each of them half."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest

from everstep_operator.cluster.waiting_gangs import view_waiting_gang
from everstep_operator.plan import gang
from everstep_operator.plan.actions import Action, CreatePods
from everstep_operator.plan.observation import GangView
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.rejection import Rejection
from tests.builders import CREATED, job
from tests.plan.world import World


class Namespace:
    """Jobs that share a ResourceQuota of so many pods, which counts pods whether they have a node or not."""

    def __init__(self, quota: int, *nodes: int, capacity: int = 10_000, tells: bool = False) -> None:
        self.quota, self.tells = quota, tells
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
            body = build_pod(action.frozen, index, action.epoch, action.leader)
            if body["metadata"]["name"] in world.pods:
                continue
            if self.used >= self.quota:
                return Rejection(action, "Quota", self._message(body["metadata"]["name"]))
            world._create(body)
        return None

    def _message(self, pod: str) -> str:
        """Return the API server's message; other admission plugins that enforce quotas do not tell the limit."""
        if not self.tells:
            return "exceeded quota: pods"
        limits = f"requested: pods=1, used: pods={self.used}, limited: pods={self.quota}"
        return f'pods "{pod}" is forbidden: exceeded quota: team, {limits}'

    def step(self) -> None:
        views = [view_waiting_gang(world.job, world.pods.values()) for world in self.worlds]
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


def test_pods_to_which_the_scheduler_has_not_come_hold_a_quota_no_longer_than_others() -> None:
    namespace = Namespace(4, 4, 4)
    for world in namespace.worlds:
        world.bind = lambda: None  # type: ignore[method-assign]
    namespace.halve()
    for _ in range(120):
        namespace.step()
    older, younger = namespace.worlds
    assert (len(older.pods), len(younger.pods)) == (4, 0)


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


@pytest.mark.parametrize("late", [0, 45, 300])
def test_an_older_that_its_quota_can_never_admit_gives_way_like_one_that_no_nodes_can_hold(late: int) -> None:
    namespace = Namespace(4, 8, 4, tells=True)
    older, younger = namespace.worlds
    namespace.worlds = [older]
    for _ in range(1 + late):
        namespace.step()
    assert older.phase == "Pending"
    younger.now = older.now
    namespace.worlds = [older, younger]
    namespace.seconds_until("Pending", "Running", limit=120)
    assert "limited: pods=4" in older.job.status.conditions[0].message, "it goes on to say why"
    assert not older.pods
    younger.end()
    namespace.step()
    younger.pods.clear()
    namespace.quota = 8
    namespace.seconds_until("Running", "Succeeded", limit=400)


def test_one_that_its_quota_can_admit_is_not_overtaken_by_a_younger() -> None:
    namespace = Namespace(8, 8, 4, tells=True)
    older, younger = namespace.worlds
    namespace.quota = 6
    older.reconcile()  # somebody else has two
    namespace.quota = 8
    assert len(older.pods) == 6
    for _ in range(120):
        namespace.step()
    assert (older.phase, len(younger.pods)) == ("Running", 0)


BLOCKED = dataclasses.replace(
    GangView("team/one", "a", 0.0, frozenset({"p"}), wanted=4, scheduled=2), blocked=True, quota="team"
)
WAITS = GangView("other/two", "b", 1.0, frozenset({"p"}), wanted=4)


def release_after(me: GangView, *others: GangView) -> float | None:
    return gang.judge_hold(me, others, grew_at=1000, scale_up_at=None, now=1000).retry_at


@pytest.mark.parametrize("quota", ["team", ""])
def test_what_is_blocked_by_anything_else_does_not_hold_nodes_that_others_wait_for(quota: str) -> None:
    blocked = dataclasses.replace(BLOCKED, quota=quota)
    assert release_after(blocked, WAITS) == 1000 + gang.PATIENCE_BLOCKED
    recovering = dataclasses.replace(blocked, recovering=True)
    assert release_after(recovering, WAITS) == 1000 + gang.STALL_SECONDS_ALONE
    assert release_after(blocked) == 1000 + gang.STALL_SECONDS_ALONE, "nobody wants them"
    released = dataclasses.replace(blocked, scheduled=0, released_at=1000)
    assert gang.judge_retry(released, [WAITS], now=1001).retry_at == 1000 + gang.BACKOFF_SECONDS_ALONE


def test_what_a_younger_of_the_same_quota_gives_back_has_the_time_to_be_taken() -> None:
    younger = dataclasses.replace(BLOCKED, uid="c", created=2.0, scheduled=0, released_at=1060.0)
    assert release_after(BLOCKED, WAITS, younger) == 1060 + gang.PATIENCE_BLOCKED


@pytest.mark.parametrize(("quota", "every"), [("team", 330), ("", 60)], ids=["quota", "nodes"])
def test_younger_gangs_that_try_in_vain_again_and_again_do_not_prolong_what_a_blocked_one_holds(
    quota: str, every: int
) -> None:
    """Their pods are smaller than its own: what they give back does not help it, what it holds would help them."""
    younger = dataclasses.replace(WAITS, key="team/two", quota=quota, scheduled=1)
    for now in range(1000, 5000, 10):
        tried = [dataclasses.replace(younger, released_at=float(now - now % every))]
        if gang.judge_hold(BLOCKED, tried, grew_at=1000, scale_up_at=None, now=now).release:
            break
    assert now <= 1000 + gang.STALL_SECONDS_ALONE


def test_a_job_that_restarts_behind_a_quota_wants_no_nodes() -> None:
    """It has room for all of its pods; jobs that wait for nodes are not to wait for it, and its namespace's others
    give their part of the quota to it."""
    world = World(job().nodes(3).build()).run("Running")
    world.vanish(1)
    words = 'pods "digits-1" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
    world.refuse = lambda action: Rejection(action, "Quota", words) if isinstance(action, CreatePods) else None
    for _ in range(3):
        world.tick()
        world.reconcile()
    assert world.phase == "Restarting"
    view = view_waiting_gang(world.job, world.pods.values())
    assert view is not None
    assert (view.quota, view.scheduled, view.recovering, view.possible) == ("default", 2, True, False)
    assert gang.list_rivals(dataclasses.replace(WAITS, key="default/other"), [view]) == []
    assert world.job.status.conditions[0].message == words


@pytest.mark.parametrize("kind", ["Forbidden", "Invalid", "Conflict"])
def test_a_job_that_restarts_and_is_rejected_waits_for_no_nodes(kind: str) -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.vanish(1)
    world.refuse = lambda action: Rejection(action, kind, "no") if isinstance(action, CreatePods) else None
    for _ in range(3):
        world.tick()
        world.reconcile()
    assert world.phase == "Restarting"
    assert view_waiting_gang(world.job, world.pods.values()) is None


def test_a_job_that_restarts_behind_a_quota_for_ever_ends_and_says_why() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.vanish(1)
    words = 'pods "digits-1" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
    world.refuse = lambda action: Rejection(action, "Quota", words) if isinstance(action, CreatePods) else None
    for _ in range(1000):
        world.now += 60
        world.reconcile()
        if world.phase == "Failed":
            break
    assert world.job.status.transitions[-1].reason == "PendingTimeout"
    assert words in world.job.status.conditions[0].message


def test_gangs_that_wait_for_nodes_have_nothing_to_do_with_a_quota() -> None:
    waits = GangView("team/one", "a", 1.0, frozenset(), wanted=4, scheduled=2)
    blocked = dataclasses.replace(waits, key="team/two", uid="b", quota="team")
    elsewhere = dataclasses.replace(blocked, key="other/three", uid="c", quota="other")
    assert gang.list_rivals(waits, [blocked, elsewhere]) == []
    assert gang.list_rivals(blocked, [waits, elsewhere]) == [waits], "it holds nodes that the other wants"
    assert gang.list_rivals(blocked, [dataclasses.replace(blocked, uid="d", pools=frozenset({"p"}))]) != []
