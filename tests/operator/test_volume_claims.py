"""Claims are read once for each start of a job, and a read that fails costs nothing."""

from __future__ import annotations

from typing import Any

from everstep_operator.cluster import errors
from everstep_operator.cluster.volume_claims import READ_AGAIN_SECONDS, VolumeClaims
from everstep_operator.plan.frozen_template import FrozenTemplate


class Server:
    def __init__(self, **claims: list[str]) -> None:
        self.claims = claims
        self.reads: list[str] = []

    async def get(self, resource: Any, namespace: str, name: str) -> Any:
        assert resource.plural == "persistentvolumeclaims"
        self.reads.append(name)
        if name not in self.claims:
            raise errors.NotFound(404, "NotFound", name)
        return {"spec": {"accessModes": self.claims[name]}}


def frozen(epoch: int, *names: str) -> FrozenTemplate:
    volumes = [{"name": f"v-{name}", "persistentVolumeClaim": {"claimName": name}} for name in names]
    return FrozenTemplate(epoch, {"spec": {"volumes": volumes}}, {})


async def test_each_claim_is_read_once_for_each_template() -> None:
    server: Any = Server(data=["ReadWriteOnce"])
    claims = VolumeClaims(server)
    assert await claims.read("default", "u", None) == {}
    for _ in range(3):
        assert await claims.read("default", "u", frozen(1, "data")) == {"data": ("ReadWriteOnce",)}
    assert server.reads == ["data"]
    server.claims["data"] = ["ReadWriteMany"]
    assert await claims.read("default", "u", frozen(2, "data")) == {"data": ("ReadWriteMany",)}


async def test_a_claim_that_is_made_later_is_found() -> None:
    server: Any = Server()
    now = [0.0]
    claims = VolumeClaims(server, timer=lambda: now[0])
    for _ in range(3):
        assert await claims.read("default", "u", frozen(1, "data")) == {}
    assert server.reads == ["data"], "nobody asks all the time"
    server.claims["data"] = ["ReadWriteOnce"]
    now[0] += READ_AGAIN_SECONDS
    assert await claims.read("default", "u", frozen(1, "data")) == {"data": ("ReadWriteOnce",)}
