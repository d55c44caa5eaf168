"""What is in the way is never adopted, and the user is told of it."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from everstep_operator.cluster import errors
from everstep_operator.cluster.act import LEFTOVER_SECONDS, Actor, Job, Leftover
from everstep_operator.cluster.agentcode import AgentCode
from everstep_operator.cluster.cache import Cache
from everstep_operator.cluster.frozen import FrozenTemplates
from everstep_operator.cluster.leader import LeaderPoller
from everstep_operator.plan import template
from everstep_operator.plan.actions import Action, EnsureSecret, EnsureTemplate
from everstep_operator.plan.observed import Frozen, Settings
from tests.builders import job

JOB = Job("default", "digits", job().build().metadata.uid, "1", confirmed=True)


class Objects:
    """Creates and deletes; like the operator's rights, it reads no Secret."""

    def __init__(self) -> None:
        self.there: dict[tuple[str, str], Any] = {}

    async def create(self, resource: Any, namespace: str, body: Any) -> Any:
        name = (resource.plural, body["metadata"]["name"])
        if name in self.there:
            raise errors.AlreadyExists(409, "AlreadyExists", "there")
        self.there[name] = {**body, "metadata": {**body["metadata"], "uid": "u"}}
        return self.there[name]

    async def get(self, resource: Any, namespace: str, name: str) -> Any:
        assert resource.plural != "secrets"
        return self.there[(resource.plural, name)]

    async def delete(self, resource: Any, namespace: str, name: str, *, uid: str) -> None:
        del self.there[(resource.plural, name)]


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
    frozen = template.resolve(built, epoch=1, pool=None, plain=False, settings=Settings())
    assert isinstance(frozen, Frozen)
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
