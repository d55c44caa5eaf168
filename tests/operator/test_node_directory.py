"""A node is gone when the API server says so, and not when the watch is late."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import ClusterCache, Key
from everstep_operator.cluster.node_directory import NodeDirectory
from everstep_operator.plan.observation import PodView


class Server:
    def __init__(self, *names: str) -> None:
        self.names, self.asked, self.fails = set(names), 0, False
        self.pods: dict[str, Any] = {}

    async def get(self, resource: Any, namespace: str | None, name: str) -> Any:
        if resource.plural == "pods":
            return await self.get_pod(name)
        assert (resource.plural, namespace) == ("nodes", None)
        self.asked += 1
        if self.fails:
            raise errors.Unreachable("down", sent=True)
        if name not in self.names:
            raise errors.NotFound(404, "NotFound", name)
        return raw(name, 5)

    async def get_pod(self, name: str) -> Any:
        self.asked += 1
        if name not in self.pods:
            raise errors.NotFound(404, "NotFound", name)
        return self.pods[name]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def raw(name: str, version: int) -> Any:
    meta = {"name": name, "uid": name, "resourceVersion": str(version)}
    return {"metadata": meta, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}


def pod(on: str | None, job: str = "a") -> PodView:
    return PodView(index=0, name=f"{job}-0", uid="u", epoch=1, template=1, created=0.0, node=on)


def bound(at: float) -> PodView:
    return dataclasses.replace(pod("n1"), scheduled_at=at)


def nodes(*names: str) -> tuple[NodeDirectory, Any, Clock]:
    server, clock = Server(*names), Clock()

    def touched(_: Key) -> None: ...

    cache = ClusterCache(touched=touched, pool_changed=lambda _: None, pods_touched=touched)
    return NodeDirectory(server, cache, clock), server, clock  # type: ignore[arg-type]


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


async def test_a_node_that_was_gone_is_asked_for_when_pods_are_bound_to_it_again() -> None:
    """It was registered anew, and the watch of nodes is behind that of pods: a new pod would be deleted for the old
    node's end."""
    known, server, clock = nodes()
    old = bound(50.0)
    assert (await known.find_nodes_under([old]))["n1"].gone_since == 100.0
    clock.now = 101.0
    assert (await known.find_nodes_under([old]))["n1"].gone_since == 100.0
    assert server.asked == 1
    server.names.add("n1")
    assert (await known.find_nodes_under([bound(100.0)]))["n1"].gone_since is None


async def test_a_node_that_is_gone_is_not_asked_for_again_and_again() -> None:
    """A pod was bound in the second in which its node was removed."""
    known, server, clock = nodes()
    for clock.now in (100.0, 100.5, 101.5, 102.0, 103.0, 110.0):
        assert (await known.find_nodes_under([bound(100.0)]))["n1"].gone_since == 100.0
    assert server.asked <= 4


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


async def test_names_of_which_no_node_is_there_are_not_asked_for_again_and_again() -> None:
    """Pods may be kept from nodes that have never been, by an affinity of their user's."""
    known, server, clock = nodes()
    away = PodView(index=0, name="a-0", uid="u", epoch=1, template=1, created=0.0, avoids=frozenset({"x", "y", "z"}))
    for _ in range(10):
        assert set(await known.find_nodes_under([away])) == {"x", "y", "z"}
        clock.now += 1
    assert server.asked == 3


KEY: Key = ("team", "a")
MINE = {"uid": "u1", "ownerReferences": [{"controller": True, "kind": "TrainingJob", "name": "a", "uid": "job"}]}


def admitted(uid: str, **spec: Any) -> Any:
    containers = [{"name": "trainer", "image": "i", **spec.pop("container", {})}]
    return {"metadata": {**MINE, "uid": uid, "name": "a-0"}, "spec": {"containers": containers, **spec}}


def of_set(uid: str) -> PodView:
    return PodView(index=0, name="a-0", uid=uid, epoch=1, template=1, created=0.0, owner="job")


async def test_places_are_counted_for_what_admission_has_made_of_a_pod() -> None:
    """A LimitRange, a RuntimeClass and plugins for tolerations and node selectors add what no template tells."""
    known, server, _ = nodes()
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    allocatable = {"allocatable": {"cpu": "4", "pods": "10", "nvidia.com/gpu": "2"}}
    labelled = {**raw("n1", 1)["metadata"], "labels": {"team": "a"}}
    known.cache.nodes.put({"metadata": labelled, "spec": {"taints": [taint]}, "status": allocatable})
    template = {"spec": {"containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}

    def count() -> int | None:
        return known.count_places(KEY, "job", 1, template, 9)

    assert count() == 0, "nothing tolerates the taint, as far as the template tells"
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}}
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    server.pods["a-0"] = admitted("u1", container=gpu, tolerations=tolerations)
    await known.admitted.learn(KEY, "job", 1, [of_set("u1")])
    assert count() == 2
    await known.admitted.learn(KEY, "job", 1, [of_set("u1")])
    assert server.asked == 1, "once"
    await known.admitted.learn(KEY, "job", 1, [])
    assert count() == 2, "also of pods that were given back"
    server.pods["a-0"] = admitted("u2", container=gpu, tolerations=tolerations, overhead={"cpu": "3"})
    await known.admitted.learn(KEY, "job", 1, [of_set("u2")])
    assert count() == 1
    server.pods["a-0"] = admitted("u3", container=gpu, tolerations=tolerations, nodeSelector={"team": "b"})
    await known.admitted.learn(KEY, "job", 1, [of_set("u3")])
    assert count() == 0
    assert known.count_places(KEY, "job", 2, template, 9) == 0, "another template's pods tell nothing"
    known.forget(KEY)
    assert known.admitted.get(KEY, "job", 1) is None


async def test_a_pod_that_cannot_be_read_is_counted_by_its_template() -> None:
    known, server, _ = nodes()
    known.cache.nodes.put({**raw("n1", 1), "status": {"allocatable": {"pods": "3"}}})
    await known.admitted.learn(KEY, "job", 1, [of_set("u1")])
    server.pods["a-0"] = admitted("its-successor", overhead={"cpu": "3"})
    await known.admitted.learn(KEY, "job", 1, [of_set("u1")])
    assert known.count_places(KEY, "job", 1, {"spec": {"containers": [{"name": "trainer"}]}}, 9) == 3


async def test_rules_of_thousands_of_terms_do_not_keep_the_operator_from_its_lease() -> None:
    """Each term is looked at for each node, in one step of the event loop: nobody knows where such pods could be."""
    known, _, _ = nodes()
    for number in range(200):
        known.cache.nodes.put({**raw(f"n{number}", number + 1), "status": {"allocatable": {"pods": "1"}}})

    def count(terms: int) -> int | None:
        term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term] * terms}}
        template = {"spec": {"containers": [{"name": "trainer"}], "affinity": {"nodeAffinity": required}}}
        return known.count_places(KEY, "job", terms, template, 9)

    examined = known.examined
    assert count(10) == 0
    assert known.examined == examined + 200
    assert count(20_000) is None
    assert known.examined == examined + 200
