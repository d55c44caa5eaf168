"""The agent's ConfigMaps: there before pods, gone when nobody names them, never before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everstep_operator.cluster import errors
from everstep_operator.cluster.agent_code import (
    ALL,
    KEEP_SECONDS,
    MAX_COLLECTED,
    AgentCode,
    verify_agent_config_map,
)


class ConfigMaps:
    def __init__(self) -> None:
        self.there: dict[tuple[str, str], Any] = {}
        self.creates = self.reads = self.whole_reads = 0

    async def create(self, resource: Any, namespace: str, body: Any) -> Any:
        self.creates += 1
        name = (namespace, body["metadata"]["name"])
        if name in self.there:
            raise errors.AlreadyExists(409, "AlreadyExists", "there")
        meta = {**body["metadata"], "namespace": namespace, "uid": f"u{self.creates}"}
        self.there[name] = {**body, "metadata": meta}
        return self.there[name]

    async def get(self, resource: Any, namespace: str, name: str, *, metadata_only: bool = False) -> Any:
        self.reads += 1
        if (namespace, name) not in self.there:
            raise errors.NotFound(404, "NotFound", name)
        there = self.there[(namespace, name)]
        self.whole_reads += not metadata_only
        return {"metadata": there["metadata"]} if metadata_only else there

    async def delete(self, resource: Any, namespace: str, name: str, *, uid: str) -> None:
        assert self.there[(namespace, name)]["metadata"]["uid"] == uid
        del self.there[(namespace, name)]


@pytest.fixture
def client() -> Any:
    return ConfigMaps()


async def test_the_name_is_a_digest_of_the_content(client: Any) -> None:
    one, other = AgentCode(b"one"), AgentCode(b"other")
    await one.ensure(client, "ns")
    await other.ensure(client, "ns")
    assert {name for _, name in client.there} == {one.name, other.name}
    assert len(one.name) == len("everstep-agent-") + 12


async def test_it_is_created_once_and_read_for_each_set_of_pods(client: Any) -> None:
    agent = AgentCode(b"code")
    for _ in range(3):
        await agent.ensure(client, "ns")
    assert (client.creates, client.reads) == (1, 3)


async def test_its_content_is_read_once_until_another_object_has_its_name(client: Any) -> None:
    agent, key = AgentCode(b"code"), ("ns", AgentCode(b"code").name)
    await agent.ensure(client, "ns")
    client.there[key] = {**client.there[key], "metadata": {**client.there[key]["metadata"], "uid": "another"}}
    for _ in range(3):
        await agent.ensure(client, "ns")
    assert client.whole_reads == 1
    del client.there[key]
    await agent.ensure(client, "ns")
    assert client.creates == 2
    client.there[key] = {**AgentCode(b"evil").config_map(), "metadata": {"name": agent.name, "uid": "evil"}}
    for _ in range(2):
        with pytest.raises(errors.NotOurs):
            await agent.ensure(client, "ns")


async def test_its_content_is_not_read_by_many_sets_at_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, read = AgentCode(b"code"), client.get

    async def read_slowly(*about: Any, **how: Any) -> Any:
        await asyncio.sleep(0)  # the others ask meanwhile
        return await read(*about, **how)

    await agent.ensure(client, "ns")
    await agent.ensure(client, "ns")
    monkeypatch.setattr(client, "get", read_slowly)
    before = client.whole_reads
    await asyncio.gather(*(agent.ensure(client, "ns") for _ in range(20)))
    assert client.whole_reads == before


async def test_what_may_be_edited_is_read_each_time(client: Any) -> None:
    agent, key = AgentCode(b"code"), ("ns", AgentCode(b"code").name)
    client.there[key] = {**agent.config_map(), "immutable": False, "metadata": {"name": agent.name, "uid": "u"}}
    await agent.ensure(client, "ns")
    client.there[key] = {**client.there[key], "binaryData": AgentCode(b"evil").config_map()["binaryData"]}
    with pytest.raises(errors.NotOurs):
        await agent.ensure(client, "ns")


async def test_other_code_under_our_name_is_not_run(client: Any) -> None:
    agent = AgentCode(b"code")
    client.there[("ns", agent.name)] = {**AgentCode(b"evil").config_map(), "metadata": {"name": agent.name}}
    with pytest.raises(errors.NotOurs):
        await agent.ensure(client, "ns")


async def test_an_old_version_goes_an_hour_after_its_last_job(client: Any) -> None:
    old, new = AgentCode(b"old"), AgentCode(b"new")
    await old.ensure(client, "ns")
    await new.ensure(client, "ns")

    async def collect(used: set[str], now: float) -> None:
        await new.collect_garbage(client, list(client.there.values()), {"ns": used}, now)

    await collect({old.name, new.name}, 0)
    await collect({new.name}, 10)
    await collect({new.name}, 10 + KEEP_SECONDS - 1)
    assert ("ns", old.name) in client.there
    await collect({ALL}, 10 + KEEP_SECONDS + 1)  # somebody's template is unknown: it may be the old one
    assert ("ns", old.name) in client.there
    await collect({new.name}, 20 + KEEP_SECONDS)
    await collect({new.name}, 20 + 2 * KEEP_SECONDS)
    assert set(client.there) == {("ns", new.name)}


async def test_what_was_deleted_by_hand_is_made_again_after_the_next_look(client: Any) -> None:
    agent = AgentCode(b"code")
    await agent.ensure(client, "ns")
    client.there.clear()
    await agent.collect_garbage(client, [], {}, 0)
    await agent.ensure(client, "ns")
    assert ("ns", agent.name) in client.there


async def test_an_older_agent_is_the_code_that_the_job_was_started_with(client: Any) -> None:
    """A stranger who may write ConfigMaps would have other code run in every pod that is replaced."""
    old = AgentCode(b"old")
    await old.ensure(client, "ns")
    for digest in (old.digest, ""):  # "": a template of before it said it
        await verify_agent_config_map(client, "ns", old.name, digest)
    genuine = client.there[("ns", old.name)]
    other_code = {"binaryData": AgentCode(b"evil").config_map()["binaryData"]}
    more_files = {"binaryData": {**genuine["binaryData"], "sitecustomize.py": "eA=="}}
    for forged in (other_code, more_files, {"binaryData": None}, {"binaryData": {"agent.pyz": "no base64"}}):
        client.there[("ns", old.name)] = {**genuine, **forged}
        with pytest.raises(errors.NotOurs):
            await verify_agent_config_map(client, "ns", old.name, old.digest)
    client.there[("ns", old.name)] = genuine
    with pytest.raises(errors.NotOurs):
        await verify_agent_config_map(client, "ns", old.name, old.digest[:12] + "0" * 52)


async def test_what_is_no_agent_is_neither_deleted_nor_taken_for_one(client: Any) -> None:
    """Somebody's ConfigMap with our label; and one that was put in place of the agent while jobs use it."""
    agent = AgentCode(b"code")
    await agent.ensure(client, "ns")
    label = {"everstep.dev/agent": "x"}
    mine = {"metadata": {"namespace": "ns", "name": "mine", "uid": "m", "labels": label}, "data": {"a": "b"}}
    forged = {**client.there[("ns", agent.name)], "binaryData": AgentCode(b"evil").config_map()["binaryData"]}
    forged["metadata"] = {**forged["metadata"], "uid": "f"}
    client.there = {("ns", "mine"): mine, ("ns", agent.name): forged}
    for now in (0.0, KEEP_SECONDS + 1):
        await agent.collect_garbage(client, list(client.there.values()), {}, now)
    assert set(client.there) == {("ns", "mine"), ("ns", agent.name)}
    with pytest.raises(errors.NotOurs):
        await agent.ensure(client, "ns")


async def test_what_jobs_use_and_somebody_has_deleted_is_restored_by_the_next_look(client: Any) -> None:
    """Their pods exist and wait for it: nothing else would ever ask for it again."""
    agent = AgentCode(b"code")
    for namespace in ("ns", "plain", "kept"):
        await agent.ensure(client, namespace)
    kept = client.there[("kept", agent.name)]
    client.there = {("kept", agent.name): kept}
    used = {"ns": {agent.name}, "plain": {"another"}, "kept": {agent.name}}
    await agent.collect_garbage(client, [kept], used, 0)
    await agent.restore_missing(client, used)
    assert set(client.there) == {("ns", agent.name), ("kept", agent.name)}


async def test_one_namespace_that_refuses_it_keeps_it_from_no_other(client: Any) -> None:
    agent = AgentCode(b"code")
    client.there[("evil", agent.name)] = {**AgentCode(b"evil").config_map(), "metadata": {"name": agent.name}}
    await agent.restore_missing(client, {"evil": {agent.name}, "ns": {agent.name}})
    assert ("ns", agent.name) in client.there


async def test_a_delete_that_a_policy_refuses_ends_no_collection(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One namespace's webhook may not keep all others from being compared; it is tried again each time."""
    old, new = AgentCode(b"old"), AgentCode(b"new")
    for namespace in ("a", "b"):
        await old.ensure(client, namespace)
    delete = client.delete

    async def refuse(resource: Any, namespace: str, name: str, **keywords: Any) -> Any:
        if namespace == "a":
            raise errors.Forbidden(403, "Forbidden", "a policy")
        return await delete(resource, namespace, name, **keywords)

    monkeypatch.setattr(client, "delete", refuse)
    for now in (0.0, KEEP_SECONDS + 1, KEEP_SECONDS + 2):
        await new.collect_garbage(client, list(client.there.values()), {}, now)
    assert set(client.there) == {("a", old.name)}


async def test_code_that_was_replaced_is_found_before_the_next_pods(client: Any) -> None:
    """Deleted and made again under its name: a replacement of a lost pod would run it as PID 1."""
    agent = AgentCode(b"code")
    await agent.ensure(client, "ns")
    evil = AgentCode(b"evil").config_map()["binaryData"]
    there = client.there[("ns", agent.name)]
    client.there[("ns", agent.name)] = {**there, "binaryData": evil, "metadata": {**there["metadata"], "uid": "evil"}}
    with pytest.raises(errors.NotOurs):
        await agent.ensure(client, "ns")


async def test_of_those_that_only_look_like_agents_few_are_read_at_a_time(client: Any) -> None:
    """Anybody may set our label, on as many as a quota allows, and each list is a chance to look at some."""
    agent = AgentCode(b"code")
    for number in range(3 * MAX_COLLECTED):
        name = f"everstep-agent-{number:012x}"
        client.there[("ns", name)] = {"metadata": {"namespace": "ns", "name": name, "uid": "u"}, "data": {}}
    before = dict(client.there)
    reads = []
    for look in range(5):
        await agent.collect_garbage(client, list(client.there.values()), {}, 2 * KEEP_SECONDS * bool(look))
        reads.append(client.reads)
    assert reads == [0, *(MAX_COLLECTED * many for many in (1, 2, 3, 3))]
    assert client.there == before
