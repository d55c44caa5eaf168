"""Lists repair what the watch has not told, and end a watch that has gone deaf."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everstep_operator.cluster import errors
from everstep_operator.cluster.agent_code import AgentCode
from everstep_operator.cluster.cache import ClusterCache
from everstep_operator.cluster.client import ListPage
from everstep_operator.cluster.disruption_budgets import DisruptionBudgets
from everstep_operator.cluster.frozen_templates import FrozenTemplates
from everstep_operator.cluster.resources import NODES, PODS
from everstep_operator.cluster.resync import Resync
from everstep_operator.plan import template
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.plan_settings import PlanSettings
from tests.builders import job


class Server:
    """Lists what is `there`, by plural; creates ConfigMaps."""

    def __init__(self) -> None:
        self.there: dict[str, list[Any]] = {}
        self.version = 1

    async def list(
        self, resource: Any, namespace: str | None, *, labels: str | None = None, metadata_only: bool = False, **_: Any
    ) -> AsyncIterator[ListPage]:
        assert metadata_only == (resource.plural == "configmaps")
        self.version += 1
        yield ListPage(list(self.there.get(resource.plural, ())), self.version)

    async def get(self, resource: Any, namespace: str, name: str, **_: Any) -> Any:
        raise errors.NotFound(404, "NotFound", name)

    async def create(self, resource: Any, namespace: str, body: Any) -> Any:
        made = {**body, "metadata": {**body["metadata"], "namespace": namespace, "uid": "u"}}
        self.there.setdefault(resource.plural, []).append(made)
        return made


@pytest.fixture
def server() -> Any:
    return Server()


@pytest.fixture
def deaf() -> list[str]:
    """Grows by the kinds whose watch is taken for deaf."""
    return []


@pytest.fixture
def resync(server: Any, deaf: list[str], monkeypatch: pytest.MonkeyPatch) -> Resync:
    monkeypatch.setattr("everstep_operator.cluster.resync.EVENT_DELAY_SECONDS", 0.2)
    monkeypatch.setattr("everstep_operator.cluster.comparison.CONFIRM_SECONDS", 0.01)
    cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
    frozen, agent = FrozenTemplates(server, (b"",)), AgentCode(b"code")
    budgets = DisruptionBudgets(server, enabled=False)
    return Resync(
        server,
        cache,
        frozen,
        agent,
        budgets,
        (),
        300.0,
        deaf=lambda kinds: deaf.extend(kind.plural for kind in kinds),
        wake=lambda _: None,
    )


async def test_the_agent_of_a_job_that_waits_for_it_is_made_again(resync: Resync, server: Any) -> None:
    """`kubectl delete configmap --all`: pods that are not running yet would wait until their job's startup timeout."""
    built = job().build()
    server.there["trainingjobs"] = [job().manifest()]
    await resync.run_once()
    assert "configmaps" not in server.there, "nobody knows yet that the job wants one"
    settings = PlanSettings(agent_digest=resync.agent.digest)
    made = template.resolve_template(built, epoch=1, pool=None, plain=False, settings=settings)
    assert isinstance(made, FrozenTemplate)
    signed = template.build_config_map(built, made, b"")
    assert resync.frozen.put("default", built.metadata.uid, 1, signed) == made
    await resync.run_once()
    assert [item["metadata"]["name"] for item in server.there["configmaps"]] == [resync.agent.name]


async def test_a_stream_that_has_gone_deaf_is_not_hidden_by_another_that_talks(
    resync: Resync, server: Any, deaf: list[str]
) -> None:
    """Nodes tell something all the time."""
    await resync.run_once()
    server.there["pods"] = [pod()]
    asyncio.get_running_loop().call_later(0.05, resync.note_event, NODES)
    await resync.run_once()
    assert deaf == ["pods"]


async def test_an_event_that_comes_a_moment_after_the_list_tells_of_no_deafness(
    resync: Resync, server: Any, deaf: list[str]
) -> None:
    await resync.run_once()
    server.there["pods"] = [pod()]
    asyncio.get_running_loop().call_later(0.05, resync.note_event, PODS)
    await resync.run_once()
    assert deaf == []


def pod() -> Any:
    meta = {"name": "digits-0", "namespace": "default", "uid": "p", "creationTimestamp": "2026-01-01T12:00:00Z"}
    labels = {"everstep.dev/job": "digits", "everstep.dev/template": "1", "everstep.dev/index": "0"}
    return {"metadata": {**meta, "labels": labels, "resourceVersion": "1"}}


async def test_what_one_list_leaves_out_is_not_taken_for_deleted(
    resync: Resync, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job would be looked after no more until the next period."""
    server.there = {"trainingjobs": [job().manifest()], "pods": [pod()]}
    await resync.run_once()
    listed, left_out = server.list, set[str]()

    async def list_nothing_once(resource: Any, *args: Any, **options: Any) -> AsyncIterator[ListPage]:
        async for page in listed(resource, *args, **options):
            yield page if resource.plural in left_out else ListPage([], page.version)
        left_out.add(resource.plural)

    monkeypatch.setattr(server, "list", list_nothing_once)
    woken: list[Any] = []
    resync.wake = woken.append
    await resync.run_once()
    assert left_out >= {"trainingjobs", "pods"}
    assert (len(resync.cache.jobs), len(resync.cache.pods), woken) == (1, 1, [("default", "digits")])
    monkeypatch.setattr(server, "list", listed)
    server.there = {}
    await resync.run_once()
    assert (len(resync.cache.jobs), len(resync.cache.pods)) == (0, 0), "two lists are believed"


async def test_a_watched_namespace_that_is_gone_stops_no_other(
    resync: Resync, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Role went with it, so every list of it is forbidden."""
    listed, gone = server.list, {"gone"}

    async def refuse(resource: Any, namespace: str | None, **options: Any) -> AsyncIterator[ListPage]:
        if namespace in gone:
            raise errors.NotAuthorized(403, "Forbidden", "no Role")
        async for page in listed(resource, namespace, **options):
            yield page

    monkeypatch.setattr(server, "list", refuse)
    resync.namespaces = ("gone", "default")
    server.there["trainingjobs"] = [job().manifest()]
    await resync.run_once()
    assert resync.done_at is not None
    assert len(resync.cache.jobs) == 1
    assert resync.forbidden == {"gone"}
    gone.add("default")
    with pytest.raises(errors.NotAuthorized):  # nothing can be read at all: not ready
        await resync.run_once()
    gone.clear()
    back: list[set[str]] = []
    resync.readable = back.append
    await resync.run_once()
    assert not resync.forbidden
    assert back == [{"gone"}]


async def test_what_anybody_labels_as_an_agent_is_not_read_to_be_listed(
    resync: Resync, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand ConfigMaps of a megabyte each are more than the operator may have of memory."""
    kept: list[Any] = []

    async def collect(client: Any, found: list[Any], *_: Any) -> None:
        kept.extend(found)

    monkeypatch.setattr(resync.agent, "collect_garbage", collect)
    meta = {"namespace": "default", "name": "large", "uid": "u", "annotations": {"a": "b" * 1000}, "labels": {"c": "d"}}
    server.there["configmaps"] = [{"metadata": meta}]
    await resync.run_once()
    assert kept == [{"metadata": {"namespace": "default", "name": "large", "uid": "u"}}]
