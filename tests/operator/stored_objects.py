"""A client of the API server whose objects are in memory."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

from everstep_operator.cluster import errors
from everstep_operator.cluster.client import ListPage
from everstep_operator.cluster.server_clock import ServerClock


class StoredObjects:
    """Creates and deletes; like the operator's rights, it reads no Secret."""

    clock = ServerClock()

    def __init__(self) -> None:
        self.there: dict[tuple[str, str], Any] = {}
        self.lose = ""  # the answer to the next create of this name
        self.admission: errors.ApiError | None = None  # rejects every create, also of what is there
        self.mutate: Callable[[Any], Any] = lambda body: body  # a mutating webhook
        self.created: list[str] = []
        self.merges = self.reads = 0
        self.merge_error: errors.ApiError | None = None

    async def create(self, resource: Any, namespace: str, body: Any, **_: Any) -> Any:
        name = (resource.plural, body["metadata"]["name"])
        if self.admission is not None:
            raise self.admission
        if name in self.there:
            raise errors.AlreadyExists(409, "AlreadyExists", "there")
        body = self.mutate(copy.deepcopy(body))
        self.there[name] = {**body, "metadata": {**body["metadata"], "uid": "u", "resourceVersion": "1"}}
        self.created.append(name[1])
        if self.lose == name[1]:
            self.lose = ""
            raise errors.Unreachable("lost", sent=True)
        return self.there[name]

    async def get(self, resource: Any, namespace: str, name: str, **_: Any) -> Any:
        assert resource.plural != "secrets"
        self.reads += 1
        if (resource.plural, name) not in self.there:
            raise errors.NotFound(404, "NotFound", name)
        return self.there[(resource.plural, name)]

    async def list(
        self, resource: Any, namespace: str, *, labels: str, metadata_only: bool = False
    ) -> AsyncIterator[ListPage]:
        yield ListPage([body for (plural, _), body in self.there.items() if plural == resource.plural], 1)

    async def merge(self, resource: Any, namespace: str, body: Any) -> Any:
        self.merges += 1
        if (rejection := self.merge_error or self.admission) is not None:
            raise rejection
        if (name := (resource.plural, body["metadata"]["name"])) not in self.there:
            raise errors.NotFound(404, "NotFound", name[1])
        if self.there[name]["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise errors.Conflict(409, "Conflict", "it has changed since")
        spec = self.there[name]["spec"]
        spec["selector"] = {k: v for k, v in spec["selector"].items() if k not in body["spec"]["selector"]}

    async def delete(
        self, resource: Any, namespace: str, name: str, *, uid: str | None, grace: int | None = None
    ) -> bool:
        there = self.there.get((resource.plural, name))
        if there is not None and uid in (None, there.get("metadata", {}).get("uid")):
            del self.there[(resource.plural, name)]
        return there is not None
