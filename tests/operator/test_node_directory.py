"""A node is gone when the API server says so, and not when the watch is late."""

from __future__ import annotations

from typing import Any

import pytest

from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import ClusterCache, Key
from everstep_operator.cluster.node_directory import NodeDirectory
from everstep_operator.plan.observation import PodView


class Server:
    def __init__(self, *names: str) -> None:
        self.names, self.asked, self.fails = set(names), 0, False

    async def get(self, resource: Any, namespace: str | None, name: str) -> Any:
        assert (resource.plural, namespace) == ("nodes", None)
        self.asked += 1
        if self.fails:
            raise errors.Unreachable("down", sent=True)
        if name not in self.names:
            raise errors.NotFound(404, "NotFound", name)
        return raw(name, 5)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def raw(name: str, version: int) -> Any:
    meta = {"name": name, "uid": name, "resourceVersion": str(version)}
    return {"metadata": meta, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}


def pod(on: str | None, job: str = "a") -> PodView:
    return PodView(index=0, name=f"{job}-0", uid="u", epoch=1, template=1, created=0.0, node=on)


def nodes(*names: str) -> tuple[NodeDirectory, Any, Clock]:
    server, clock = Server(*names), Clock()

    def touched(_: Key) -> None: ...

    return NodeDirectory(server, ClusterCache(touched=touched, pool_changed=lambda _: None), clock), server, clock  # type: ignore[arg-type]


async def test_what_the_watch_has_told_is_not_asked_for() -> None:
    known, server, _ = nodes()
    known.cache.nodes.put(raw("n1", 1))
    assert set(await known.find_nodes_under([pod("n1"), pod(None)])) == {"n1"}
    assert server.asked == 0


async def test_a_node_that_is_younger_than_the_watch_is_found() -> None:
    known, server, _ = nodes("n1")
    for _ in range(2):
        assert (await known.find_nodes_under([pod("n1")]))["n1"].gone_since is None
    assert server.asked == 1


async def test_a_node_is_gone_since_the_first_time_it_was_not_found() -> None:
    known, server, clock = nodes()
    known.cache.pods.put({"metadata": {"name": "a-0", "labels": {"everstep.dev/job": "a"}}, "spec": {"nodeName": "n1"}})
    for _ in range(3):
        assert (await known.find_nodes_under([pod("n1")]))["n1"].gone_since == 100.0
        clock.now += 1
        await known.find_nodes_under([pod("other")])
    assert server.asked == 2, "once each"


async def test_a_node_that_comes_back_under_its_name_is_there_and_may_be_lost_again() -> None:
    known, _, clock = nodes()
    await known.find_nodes_under([pod("n1")])
    known.cache.nodes.put(raw("n1", 7))
    assert (await known.find_nodes_under([pod("n1")]))["n1"].gone_since is None
    known.cache.nodes.remove(("", "n1"), "n1")
    clock.now += 1
    assert (await known.find_nodes_under([pod("n1")]))["n1"].gone_since == 101.0


async def test_no_answer_is_no_answer() -> None:
    known, server, _ = nodes()
    server.fails = True
    with pytest.raises(errors.Unreachable):
        await known.find_nodes_under([pod("n1")])
