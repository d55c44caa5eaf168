"""A node is silent when its Lease was seen not to change for long enough, by our own clock and by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import ClusterCache, Key
from everstep_operator.cluster.node_leases import NODE_LEASES_NAMESPACE, UNAUTHORIZED_PERIOD, NodeLeases
from everstep_operator.plan.node_view import NodeView

JOB: Key = ("team", "digits")
SILENCE = 20.0


class Kubelets:
    """Leases of nodes as an API server has them. Time passes when the test says so, for all of its readers too."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.versions: dict[str, int] = {}
        self.alive: set[str] = set()
        self.error: Exception | None = None
        self.asked = 0
        self.duration = 40
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    async def get(self, resource: Any, namespace: str | None, name: str) -> Any:
        assert (resource.plural, namespace) == ("leases", NODE_LEASES_NAMESPACE)
        self.asked += 1
        if self.error is not None:
            raise self.error
        if name not in self.versions:
            raise errors.NotFound(404, "NotFound", name)
        renewals = int(4 * self.now / self.duration) if name in self.alive else 0
        meta = {"name": name, "resourceVersion": str(self.versions[name] + renewals)}
        return {"metadata": meta, "spec": {"leaseDurationSeconds": self.duration}}

    async def sleep(self, seconds: float) -> None:
        until = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, until))
        await until

    async def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            for _ in range(10):
                await asyncio.sleep(0)
            due = [(at, one) for at, one in self._sleepers if at <= end and not one.done()]
            self._sleepers = [(at, one) for at, one in self._sleepers if not one.done()]
            if not due:
                break
            self.now = max(self.now, min(at for at, _ in due))
            for at, one in due:
                if at <= self.now:
                    one.set_result(None)
        self.now = end


class Follower:
    def __init__(self) -> None:
        self.server = Kubelets()
        self.woken: list[Key] = []
        self.cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
        self.leases = NodeLeases(
            self.server,  # type: ignore[arg-type]
            self.cache,
            self.woken.append,
            clock=lambda: self.server.now + 5e8,
            silence=SILENCE,
            timer=lambda: self.server.now,
            sleep=self.server.sleep,
        )
        self.pass_time = self.server.pass_time

    def follow(self, *names: str, alive: bool = False) -> None:
        for name in names:
            self.server.versions.setdefault(name, 7)
        if alive:
            self.server.alive.update(names)
        self.leases.follow(JOB, frozenset(self.server.versions))

    def put_node(self, name: str, *, ready: bool = True, zone: str = "", **more: str) -> NodeView:
        labels = {**({"topology.kubernetes.io/zone": zone} if zone else {}), **more}
        meta = {"name": name, "uid": name, "resourceVersion": str(self.cache.nodes.newest + 1), "labels": labels}
        status = {"conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}]}
        self.cache.nodes.put({"metadata": meta, "status": status})
        entry = self.cache.nodes.get(("", name))
        assert entry is not None
        return entry.value

    def put_pool(self, name: str, **selector: str) -> None:
        meta = {"name": name, "uid": name, "resourceVersion": str(self.cache.pools.newest + 1)}
        self.cache.pools.put({"metadata": meta, "spec": {"nodeSelector": selector}})

    def silent(self, *names: str) -> list[str]:
        marked = self.leases.mark_silent(NodeView(name) for name in names)
        return [name for name, node in marked.items() if node.silent_since is not None]


@pytest_asyncio.fixture
async def follower() -> AsyncIterator[Follower]:
    made = Follower()
    yield made
    await made.leases.close()


async def test_a_lease_that_is_not_renewed_makes_its_node_silent_and_wakes_the_job(follower: Follower) -> None:
    follower.follow("n1")
    await follower.pass_time(SILENCE - 1)
    assert follower.silent("n1") == []
    await follower.pass_time(5)
    assert follower.silent("n1") == ["n1"]
    assert follower.woken == [JOB], "once"
    assert follower.leases.list_silent_nodes() == ("n1",)


async def test_a_lease_that_is_renewed_does_not(follower: Follower) -> None:
    follower.follow("n1", alive=True)
    follower.follow("n2")
    await follower.pass_time(3 * SILENCE)
    assert follower.silent("n1", "n2") == ["n2"]


async def test_a_kubelet_that_is_configured_to_renew_rarely_is_not_silent_for_that(follower: Follower) -> None:
    """`nodeLeaseDurationSeconds: 120` makes it every 30 s, which is longer than what is silence elsewhere."""
    follower.server.duration = 120
    follower.follow("n1", alive=True)
    follower.follow("n2")
    await follower.pass_time(25)
    assert follower.silent("n1", "n2") == []
    assert not any(node.unrenewed for node in follower.leases.mark_silent([NodeView("n1"), NodeView("n2")]).values())
    await follower.pass_time(125)
    assert follower.silent("n1", "n2") == ["n2"]


async def test_a_node_that_renews_again_is_heard_and_the_job_is_told(follower: Follower) -> None:
    follower.follow("n1")
    await follower.pass_time(SILENCE + 5)
    follower.server.alive.add("n1")
    await follower.pass_time(11)
    assert follower.silent("n1") == []
    assert follower.woken == [JOB, JOB]


async def test_time_in_which_the_api_server_was_away_does_not_count(follower: Follower) -> None:
    """Kubelets could not renew their Leases either."""
    follower.follow("n1")
    await follower.pass_time(6)
    follower.server.error = errors.Unreachable("down", sent=True)
    await follower.pass_time(60)
    follower.server.error = None
    await follower.pass_time(SILENCE - 3)
    assert follower.silent("n1") == []
    await follower.pass_time(8)
    assert follower.silent("n1") == ["n1"]


async def test_time_in_which_the_operator_s_machine_was_suspended_does_not_count(follower: Follower) -> None:
    follower.follow("n1")
    await follower.pass_time(5)
    follower.server.now += 3600
    await follower.pass_time(5)
    assert follower.silent("n1") == []


async def test_of_a_node_without_a_lease_nothing_can_be_said(follower: Follower) -> None:
    follower.leases.follow(JOB, frozenset({"virtual"}))
    await follower.pass_time(3 * SILENCE)
    assert follower.silent("virtual") == []


async def test_without_the_right_to_read_leases_they_are_asked_for_now_and_then(follower: Follower) -> None:
    """In the words of a real API server. The right may be given later."""
    words = 'leases "n1" is forbidden: User "everstep" cannot get resource "leases" in API group "coordination.k8s.io"'
    follower.server.error = errors.from_status(403, {"kind": "Status", "reason": "Forbidden", "message": words})
    follower.follow("n1")
    await follower.pass_time(60)
    assert follower.server.asked <= 60 / UNAUTHORIZED_PERIOD + 1
    assert follower.silent("n1") == []
    follower.server.error = None
    await follower.pass_time(UNAUTHORIZED_PERIOD + SILENCE + 5)
    assert follower.silent("n1") == ["n1"]


async def test_nothing_is_asked_where_silence_proves_nothing() -> None:
    server = Kubelets()
    server.error = AssertionError("it was asked")
    cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
    leases = NodeLeases(server, cache, lambda _: None, clock=float, silence=0, sleep=server.sleep)  # type: ignore[arg-type]
    leases.follow(JOB, frozenset({"n1"}))
    await server.pass_time(60)
    assert leases.list_silent_nodes() == ()


async def test_a_node_is_followed_until_no_job_suspects_it(follower: Follower) -> None:
    follower.follow("n1", alive=True)
    follower.leases.follow(("team", "other"), frozenset({"n1"}))
    follower.leases.follow(JOB, frozenset())
    follower.server.alive.clear()
    await follower.pass_time(SILENCE + 15)
    assert follower.silent("n1") == ["n1"]
    assert follower.woken == [("team", "other")]
    follower.server.alive.add("n1")
    await follower.pass_time(15)
    follower.leases.follow(("team", "other"), frozenset())
    follower.server.error = AssertionError("it was asked again")
    await follower.pass_time(60)


async def test_a_dead_node_is_avoided_until_the_scheduler_knows_of_it(follower: Follower) -> None:
    follower.put_node("n1")
    follower.follow("n1")
    await follower.pass_time(SILENCE + 5)
    follower.leases.follow(JOB, frozenset())  # its pod was deleted
    await follower.pass_time(10)
    assert follower.leases.list_silent_nodes() == ("n1",)
    follower.put_node("n1", ready=False)
    await follower.pass_time(5)
    assert follower.leases.list_silent_nodes() == ()


async def test_most_nodes_of_a_zone_that_are_silent_together_are_held(follower: Follower) -> None:
    zones = {"a1": "a", "a2": "a", "a3": "a", **{f"b{i}": "b" for i in range(6)}}
    nodes = {name: follower.put_node(name, zone=zone) for name, zone in zones.items()}
    follower.follow("a1", "a2", "b1")
    await follower.pass_time(SILENCE + 5)
    marked = follower.leases.mark_silent([nodes["a1"], nodes["b1"]])
    assert "2 of 3 of zone a are silent at once" in marked["a1"].held
    assert marked["b1"].held == ""


async def test_most_nodes_of_a_pool_that_are_silent_together_are_held(follower: Follower) -> None:
    """The switch of a rack: of its zone and its cluster they are few."""
    racks = {"r1": "west", "r2": "west", "r3": "west", **{f"e{i}": "east" for i in range(9)}}
    nodes = {name: follower.put_node(name, zone="a", rack=rack) for name, rack in racks.items()}
    follower.follow("r1", "r2", "e1")
    await follower.pass_time(SILENCE + 5)
    assert [node.held for node in follower.leases.mark_silent([nodes["r1"], nodes["e1"]]).values()] == ["", ""]
    follower.put_pool("everything")
    follower.put_pool("east", rack="east")
    follower.put_pool("west", rack="west")
    marked = follower.leases.mark_silent([nodes["r1"], nodes["e1"]])
    assert "2 of 3 of pool west are silent at once" in marked["r1"].held
    assert marked["e1"].held == ""


async def test_nodes_that_have_not_been_renewed_for_nearly_as_long_count_as_silent_too(follower: Follower) -> None:
    """One of the nodes that fall silent together is found first: it is not taken for the only one."""
    nodes = {name: follower.put_node(name, zone="a") for name in ("a1", "a2", "a3")}
    follower.follow("a1")
    await follower.pass_time(3)
    follower.follow("a2")
    await follower.pass_time(SILENCE - 2)
    assert follower.silent("a1", "a2") == ["a1"]
    marked = follower.leases.mark_silent(nodes.values())
    assert marked["a2"].unrenewed
    assert "2 of 3 of zone a are silent at once" in marked["a1"].held


async def test_nodes_that_have_been_gone_for_long_hold_nobody_and_release_nobody(follower: Follower) -> None:
    nodes = {name: follower.put_node(name, zone="a") for name in ("a1", "a2", "a3")}
    for name in ("old-1", "old-2", "old-3"):
        follower.put_node(name, zone="a", ready=False)
    follower.follow("a1", "a2")
    await follower.pass_time(SILENCE + 5)
    assert "2 of 3 of zone a are silent at once" in follower.leases.mark_silent(nodes.values())["a1"].held


async def test_when_a_lease_was_seen_to_be_renewed_is_known(follower: Follower) -> None:
    follower.follow("n1", alive=True)
    await follower.pass_time(5)
    first = follower.leases.mark_silent([NodeView("n1")])["n1"]
    assert (first.renewed_at, first.unrenewed) == (None, False), "the first read tells nothing"
    await follower.pass_time(10)
    renewed = follower.leases.mark_silent([NodeView("n1")])["n1"].renewed_at
    assert renewed is not None
    follower.server.alive.clear()
    await follower.pass_time(SILENCE + 15)
    after = follower.leases.mark_silent([NodeView("n1")])["n1"]
    assert after.silent_since is not None


async def test_a_read_that_fails_by_surprise_is_begun_again(follower: Follower) -> None:
    follower.server.error = KeyError("metadata")
    follower.follow("n1")
    await follower.pass_time(5)
    follower.server.error = None
    follower.follow("n1")
    await follower.pass_time(SILENCE + 5)
    assert follower.silent("n1") == ["n1"]


async def test_nodes_are_counted_once_for_all_who_ask_until_one_changes(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of 5,000 nodes are silent, and each of their jobs asks for each of its nodes every few seconds."""
    names = [f"n{number}" for number in range(6)]
    views = [follower.put_node(name, zone="a") for name in names]
    follower.follow(*names[:4])
    await follower.pass_time(SILENCE + 5)
    counts: list[int] = []
    items = follower.cache.nodes.items

    def counted() -> Any:
        counts.append(1)
        return items()

    monkeypatch.setattr(follower.cache.nodes, "items", counted)
    for _ in range(10):
        held = [node.held for node in follower.leases.mark_silent(views).values()]
        assert [bool(text) for text in held] == [True] * 4 + [False] * 2
    assert len(counts) == 1
    follower.server.alive.update(names[1:4])
    await follower.pass_time(11)
    assert [node.held for node in follower.leases.mark_silent(views).values()] == [""] * 6
    follower.put_node("n6", zone="a", ready=False)
    for name in names[3:]:
        follower.put_node(name, zone="a", ready=False)
    assert len([node for node in follower.leases.mark_silent(views).values() if node.silent_since]) == 1
    assert len(counts) == 3, "again after each change"
