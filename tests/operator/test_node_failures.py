"""The record of failures by node outlives the operator, can be cleared, and costs no job anything where it is away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from everstep_operator.cluster import errors
from everstep_operator.cluster.node_failures import (
    MAX_NODES,
    MAX_PER_NODE,
    READ_AGAIN_SECONDS,
    TRY_AGAIN_SECONDS,
    NodeFailures,
)
from everstep_operator.plan.node_failures import RECORD_NAME as NAME
from everstep_operator.plan.node_failures import NodeFailure

NAMESPACE = "everstep-system"
DAY = 86_400.0


class Server:
    """One ConfigMap, as an API server keeps it; `error` is raised by the next `failing` requests."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] | None = None
        self.version = 0
        self.error: Exception | None = None
        self.requests = 0
        self.before_write: Any = lambda: None

    def _ask(self) -> None:
        self.requests += 1
        if self.error is not None:
            raise self.error

    async def get(self, resource: Any, namespace: str, name: str) -> Any:
        self._ask()
        assert (resource.plural, namespace, name) == ("configmaps", NAMESPACE, NAME)
        if self.stored is None:
            raise errors.NotFound(404, "NotFound", name)
        return json.loads(json.dumps(self.stored))

    async def create(self, resource: Any, namespace: str, body: Any) -> Any:
        self._ask()
        self.before_write()
        if self.stored is not None:
            raise errors.AlreadyExists(409, "AlreadyExists", NAME)
        return self._store(body)

    async def replace(self, resource: Any, namespace: str, body: Any) -> Any:
        self._ask()
        self.before_write()
        if self.stored is None or body["metadata"]["resourceVersion"] != self.stored["metadata"]["resourceVersion"]:
            raise errors.Conflict(409, "Conflict", NAME)
        return self._store(body)

    def _store(self, body: Any) -> Any:
        self.version += 1
        self.stored = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        return self.stored

    def clear(self, node: str) -> None:
        assert self.stored is not None
        self._store({**self.stored, "data": {name: each for name, each in self.stored["data"].items() if name != node}})


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Any:
    return Server()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_record(server: Any, clock: Clock, window: float = DAY) -> NodeFailures:
    return NodeFailures(
        server,
        NAMESPACE,
        window=window,
        clock=clock,
        count_nodes=lambda: 8,
        has_node=lambda name: name != "made-up",
        timer=clock,
    )


def failure(clock: Clock, name: str, namespace: str = "team-a", **more: bool) -> dict[str, NodeFailure]:
    return {"n1": NodeFailure(name, namespace, "digits", "PodLost", clock.now, **more)}


async def test_a_node_is_avoided_from_its_second_failure_on_and_the_next_operator_knows(
    server: Any, clock: Clock
) -> None:
    record = open_record(server, clock)
    assert await record.list_avoided("team-a") == ()
    assert await record.record(failure(clock, "1.1")) == []
    (event,) = await record.record(failure(clock, "1.2"))
    assert event.reason == "NodeAvoided"
    assert "n1" in event.message
    assert "everstep nodes --clear n1" in event.message
    assert await record.list_avoided("team-a") == ("n1",)
    assert await record.list_avoided("team-b") == ()
    assert await open_record(server, clock).list_avoided("team-a") == ("n1",)
    assert await open_record(server, clock, window=0).list_avoided("team-a") == (), "switched off"


async def test_what_is_seen_again_is_recorded_once(server: Any, clock: Clock) -> None:
    record = open_record(server, clock)
    for _ in range(5):
        assert await record.record(failure(clock, "1.1")) == []
    asked = server.requests
    assert await record.record(failure(clock, "1.1")) == []
    assert server.requests == asked
    assert await open_record(server, clock).record(failure(clock, "1.1")) == [], (
        "whoever died before the status said so"
    )
    assert await record.list_avoided("team-a") == ()


async def test_another_namespace_s_failure_binds_everybody(server: Any, clock: Clock) -> None:
    record = open_record(server, clock)
    await record.record(failure(clock, "1.1"))
    await record.record(failure(clock, "2.1", "team-b"))
    assert await record.list_avoided("team-c") == ("n1",)
    assert record.list_avoided_by_all() == ("n1",)


async def test_a_node_is_used_again_when_the_window_is_over(server: Any, clock: Clock) -> None:
    record = open_record(server, clock)
    await record.record(failure(clock, "1.1", hardware=True))
    assert await record.list_avoided("team-a") == ("n1",)
    clock.now += DAY + 1
    assert await record.list_avoided("team-a") == ()
    await record.record({"n2": NodeFailure("3.1", "team-a", "digits", "PodLost", clock.now)})
    assert list(server.stored["data"]) == ["n2"], "what counts no more is gone from the record"


async def test_whoever_clears_a_node_is_heard_within_seconds(server: Any, clock: Clock) -> None:
    record = open_record(server, clock)
    await record.record(failure(clock, "1.1", hardware=True))
    server.clear("n1")
    clock.now += READ_AGAIN_SECONDS + 1
    assert await record.list_avoided("team-a") == ()


async def test_a_clear_at_the_moment_of_a_write_is_not_undone(server: Any, clock: Clock) -> None:
    record = open_record(server, clock)
    await record.record(failure(clock, "1.1", hardware=True))

    def clear_once() -> None:
        server.before_write = lambda: None
        server.clear("n1")

    server.before_write = clear_once
    await record.record({"n2": NodeFailure("3.1", "team-a", "digits", "PodLost", clock.now)})
    assert list(server.stored["data"]) == ["n2"]


@pytest.mark.parametrize(
    "error",
    [errors.Unreachable("down", sent=True), errors.Forbidden(403, "Forbidden", "no"), errors.ServerError(500, "", "")],
)
async def test_a_record_that_cannot_be_kept_ends_nothing_and_is_kept_later(
    server: Any, clock: Clock, error: Exception
) -> None:
    record = open_record(server, clock)
    server.error = error
    await record.record(failure(clock, "1.1"))
    assert len(await record.record(failure(clock, "1.2"))) == 1
    asked = server.requests
    for _ in range(20):
        assert await record.list_avoided("team-a") == ("n1",), "by what this process remembers"
    assert server.requests == asked, "which is not asked again at each look"
    server.error = None
    clock.now += TRY_AGAIN_SECONDS
    assert await record.list_avoided("team-a") == ("n1",)
    assert await open_record(server, clock).list_avoided("team-a") == ("n1",)


@pytest.mark.parametrize("data", [{"n1": "{"}, {"n1": "7"}, {"n1": '[{"id": 1}]'}, {"n1": '["x"]'}, {"n1": None}, None])
async def test_what_is_no_record_is_read_as_none(server: Any, clock: Clock, data: Any) -> None:
    server._store({"metadata": {"name": NAME}, "data": data})
    record = open_record(server, clock)
    assert await record.list_avoided("team-a") == ()
    await record.record(failure(clock, "1.1", hardware=True))
    assert await open_record(server, clock).list_avoided("team-a") == ("n1",)


async def test_failures_of_jobs_that_are_looked_at_together_are_all_recorded(server: Any, clock: Clock) -> None:
    """A node that dies takes pods of several jobs with it, in the same moment."""

    class Slow(Server):
        async def get(self, *where: Any) -> Any:
            found = await super().get(*where)
            await asyncio.sleep(0)
            return found

        async def replace(self, *what: Any) -> Any:
            await asyncio.sleep(0)
            stored = await super().replace(*what)
            await asyncio.sleep(0)
            return stored

    server = Slow()
    server._store({"metadata": {"name": NAME}, "data": {}})
    record = open_record(server, clock)
    found = [failure(clock, f"{number}.1", f"team-{number}") for number in range(5)]
    await asyncio.gather(*(record.record(each) for each in found), *(record.list_avoided("team-0") for _ in range(5)))
    assert sorted(each["id"] for each in json.loads(server.stored["data"]["n1"])) == [f"{n}.1" for n in range(5)]
    assert await record.list_avoided("team-z") == ("n1",)


async def test_more_jobs_than_a_node_s_record_holds_do_not_displace_each_other_for_ever(
    server: Any, clock: Clock
) -> None:
    """Each of them sees the same device at each look."""
    record = open_record(server, clock)
    for _ in range(5):
        for number in range(MAX_PER_NODE + 3):
            await record.record(failure(clock, f"pod-{number}/gpu", hardware=True, witnessed=True))
            clock.now += 1
    assert server.requests == 2 * (MAX_PER_NODE + 3)


async def test_a_node_that_was_cleared_is_not_avoided_again_for_what_was_known(server: Any, clock: Clock) -> None:
    record = open_record(server, clock)
    await record.record(failure(clock, "pod-1/gpu", hardware=True))
    server.clear("n1")
    clock.now += READ_AGAIN_SECONDS + 1
    await record.list_avoided("team-a")
    assert await record.record(failure(clock, "pod-1/gpu", hardware=True)) == []
    assert await record.list_avoided("team-a") == ()
    clock.now += DAY
    await record.record(failure(clock, "pod-1/gpu", hardware=True))
    assert await record.list_avoided("team-a") == ("n1",), "it has lasted for another day"


async def test_one_namespace_displaces_nothing_that_others_have_to_say(server: Any, clock: Clock) -> None:
    record = open_record(server, clock)
    await record.record(failure(clock, "b", "team-b"))
    await record.record(failure(clock, "seen", "team-c", hardware=True, witnessed=True))
    for number in range(3 * MAX_PER_NODE):
        clock.now += 1
        await record.record(failure(clock, f"1.{number}"))
    kept = [each["namespace"] for each in json.loads(server.stored["data"]["n1"])]
    assert sorted(kept) == ["team-a"] * (MAX_PER_NODE - 2) + ["team-b", "team-c"]


async def test_nodes_that_a_pod_only_names_are_not_recorded(server: Any, clock: Clock) -> None:
    """Whoever may make pods could fill the record with them."""
    record = open_record(server, clock)
    assert await record.record({"made-up": NodeFailure("1.1", "team-a", "digits", "PodLost", clock.now, True)}) == []
    assert server.requests == 0


async def test_the_record_stays_small(server: Any, clock: Clock) -> None:
    record = open_record(server, clock)
    for number in range(2 * MAX_PER_NODE):
        clock.now += 1
        await record.record(failure(clock, f"1.{number}"))
    assert len(json.loads(server.stored["data"]["n1"])) == MAX_PER_NODE
    clock.now += 1
    for number in range(MAX_PER_NODE):
        many = {
            f"{i:0253}": NodeFailure(f"{i:036}/{number:09}.000000001", "a" * 63, "b" * 63, "ContainerKilled", clock.now)
            for i in range(MAX_NODES)
        }
        await record.record(many)
    assert len(server.stored["data"]) == MAX_NODES
    assert "n1" not in server.stored["data"]
    assert len(json.dumps(server.stored["data"])) < 2**20, "as much as a ConfigMap holds"
