"""What is in the way is never adopted, and the user is told of it."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from everstep.agent.auth import job_token
from everstep_operator.api.job import TrainingJob
from everstep_operator.cluster import errors
from everstep_operator.cluster.act import LEFTOVER_SECONDS, Actor, Job, Leftover
from everstep_operator.cluster.agentcode import AgentCode
from everstep_operator.cluster.cache import Cache
from everstep_operator.cluster.client import Page
from everstep_operator.cluster.frozen import FrozenTemplates
from everstep_operator.cluster.leader import LeaderPoller
from everstep_operator.plan import template
from everstep_operator.plan.actions import Action, DeleteStale, EnsureAgent, EnsureSecret, EnsureTemplate
from everstep_operator.plan.observed import Frozen, Settings
from tests.builders import job

JOB = Job("default", "digits", job().build().metadata.uid, "1", confirmed=True)


class Objects:
    """Creates and deletes; like the operator's rights, it reads no Secret."""

    def __init__(self) -> None:
        self.there: dict[tuple[str, str], Any] = {}
        self.held: set[tuple[str, str]] = set()  # by finalizers

    async def create(self, resource: Any, namespace: str, body: Any) -> Any:
        name = (resource.plural, body["metadata"]["name"])
        if name in self.there:
            raise errors.AlreadyExists(409, "AlreadyExists", "there")
        self.there[name] = {**body, "metadata": {**body["metadata"], "uid": "u"}}
        return self.there[name]

    async def get(self, resource: Any, namespace: str, name: str) -> Any:
        assert resource.plural != "secrets"
        if (resource.plural, name) not in self.there:
            raise errors.NotFound(404, "NotFound", name)
        return self.there[(resource.plural, name)]

    async def list(self, resource: Any, namespace: str, *, labels: str) -> AsyncIterator[Page]:
        yield Page([body for (plural, _), body in self.there.items() if plural == resource.plural], 1)

    async def delete(self, resource: Any, namespace: str, name: str, *, uid: str | None) -> None:
        if (resource.plural, name) not in self.held:
            self.there.pop((resource.plural, name), None)


@pytest.fixture
def objects() -> Any:
    return Objects()


class Now:
    seconds = 1000.0


@pytest_asyncio.fixture
async def actor(objects: Any) -> Actor:
    cache = Cache(touched=lambda _: None, pool_changed=lambda _: None)
    leaders, frozen = LeaderPoller(lambda *_: None), FrozenTemplates(objects)
    return Actor(objects, cache, leaders, AgentCode(b"code"), frozen, b"key", clock=lambda: Now.seconds)


async def test_a_strangers_secret_is_waited_for_and_then_told_as_a_conflict(
    actor: Actor, objects: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = job().build()
    frozen = resolved(built, 1)
    actions: list[Action] = [
        EnsureSecret("digits-1", 1, template.secret(built, 1)),
        EnsureTemplate("digits-1", 1, template.config_map(built, frozen)),
    ]
    objects.there[("secrets", "digits-1")] = theirs = {"data": {"mine": "yes"}}
    for _ in range(2):
        with pytest.raises(Leftover):
            await actor.carry_out(JOB, actions)
    monkeypatch.setattr(Now, "seconds", Now.seconds + LEFTOVER_SECONDS)
    for _ in range(2):
        rejection, _again = await actor.carry_out(JOB, actions)
        assert rejection is not None
        assert rejection.kind == "Conflict"
        assert "Secret default/digits-1" in rejection.message
        assert objects.there == {("secrets", "digits-1"): theirs}, "and nothing vouches for it"
    del objects.there[("secrets", "digits-1")]
    assert await actor.carry_out(JOB, actions) == (None, None)


async def test_after_a_kill_between_two_writes_the_token_is_this_jobs_own(actor: Actor, objects: Any) -> None:
    """The ConfigMap was made, then the process ended: the Secret of that name may be one of a former job."""
    built = job().build()
    secret = EnsureSecret("digits-1", 1, template.secret(built, 1))
    configured = EnsureTemplate("digits-1", 1, template.config_map(built, resolved(built, 1)))
    await actor.carry_out(JOB, [configured])
    actor._fresh.clear()  # the next process
    objects.there[("secrets", "digits-1")] = {"data": {"token": "of a former job"}}
    assert await actor.carry_out(JOB, [secret, configured]) == (None, None)
    token = job_token(b"key", JOB.uid, 1)
    made = objects.there[("secrets", "digits-1")]
    assert made["data"]["token"] == base64.b64encode(token).decode()

    meta = {"name": "digits-0", "namespace": "default", "uid": "p", "creationTimestamp": "2026-01-01T12:00:00Z"}
    labels = {"everstep.dev/job": "digits", "everstep.dev/template": "1", "everstep.dev/index": "0"}
    owners = [{"kind": "TrainingJob", "name": "digits", "uid": JOB.uid, "controller": True}]
    actor.cache.pods.put({"metadata": {**meta, "labels": labels, "ownerReferences": owners}})
    assert await actor.carry_out(JOB, [secret, configured]) == (None, None)
    assert objects.there[("secrets", "digits-1")] is made, "pods use it: it is left as it is"


async def test_a_secret_that_a_finalizer_holds_back_is_waited_for(actor: Actor, objects: Any) -> None:
    built = job().build()
    configured = EnsureTemplate("digits-1", 1, template.config_map(built, resolved(built, 1)))
    await actor.carry_out(JOB, [configured])
    actor._fresh.clear()
    objects.there[("secrets", "digits-1")] = {"data": {"token": "of a former job"}}
    objects.held = {("secrets", "digits-1")}
    with pytest.raises(Leftover):
        await actor.carry_out(JOB, [EnsureSecret("digits-1", 1, template.secret(built, 1)), configured])


def resolved(built: TrainingJob, epoch: int) -> Frozen:
    made = template.resolve(built, epoch=epoch, pool=None, plain=False, settings=Settings())
    assert isinstance(made, Frozen)
    return made


async def test_of_old_templates_only_what_bears_their_name_is_deleted(actor: Actor, objects: Any) -> None:
    """Somebody may be allowed to write ConfigMaps, and not to delete Secrets."""
    built = job().build()
    for epoch in (1, 2):
        objects.there[("secrets", f"digits-{epoch}")] = template.secret(built, epoch)
        made = template.config_map(built, resolved(built, epoch))
        objects.there[("configmaps", f"digits-{epoch}")] = {**made, "metadata": {**made["metadata"], "uid": "u"}}
    lure = objects.there[("configmaps", "digits-1")]
    objects.there[("configmaps", "database")] = {**lure, "metadata": {**lure["metadata"], "name": "database"}}
    objects.there[("secrets", "database")] = {}
    assert await actor.carry_out(JOB, [DeleteStale(2)]) == (None, None)
    assert sorted(objects.there) == [
        ("configmaps", "database"), ("configmaps", "digits-2"), ("secrets", "database"), ("secrets", "digits-2"),
    ]  # fmt: skip


async def test_a_new_template_finds_the_agent_in_a_namespace_that_was_made_again(actor: Actor, objects: Any) -> None:
    """Deleted and created within one resync: nothing has told that the agent went with it."""
    built = job().build()
    actions: list[Action] = [
        EnsureSecret("digits-1", 1, template.secret(built, 1)),
        EnsureAgent(actor.agent.name, actor.agent.digest),
        EnsureTemplate("digits-1", 1, template.config_map(built, resolved(built, 1))),
    ]
    for _ in range(2):
        assert await actor.carry_out(JOB, actions) == (None, None)
        assert ("configmaps", actor.agent.name) in objects.there
        objects.there.clear()
