"""A dead node is tainted once, a node that is back loses the taint, and nobody else's taints are touched."""

from __future__ import annotations

from typing import Any

import pytest

from everstep_operator.cluster import errors
from everstep_operator.cluster.out_of_service import OutOfServiceTaints
from everstep_operator.cluster.server_clock import ServerClock
from everstep_operator.plan.node_view import parse_node
from everstep_operator.plan.out_of_service import TAINT_KEY

GPU = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
THEIRS = {"key": TAINT_KEY, "value": "nodeshutdown", "effect": "NoExecute"}


class Server:
    """One Node, and a PATCH that a stale resourceVersion is refused for."""

    def __init__(self, *taints: dict[str, str]) -> None:
        self.clock = ServerClock(steady=lambda: 0.0, wall=lambda: 1_767_268_800.0)  # 2026-01-01T12:00:00Z
        self.node: dict[str, Any] = {"metadata": {"name": "n", "resourceVersion": "1"}, "spec": {"taints": [*taints]}}
        self.report("2026-01-01T11:59:00Z")
        self.conflicts = 0
        self.rejection: errors.ApiError | None = None
        self.writes = 0

    def report(self, at: str, status: str = "True") -> None:
        self.node["status"] = {"conditions": [{"type": "Ready", "status": status, "lastHeartbeatTime": at}]}

    async def get(self, resource: Any, namespace: Any, name: str) -> Any:
        if name != "n":
            raise errors.NotFound(404, "NotFound", name)
        return self.node

    async def merge(self, resource: Any, namespace: Any, body: Any) -> Any:
        self.writes += 1
        if self.rejection is not None:
            raise self.rejection
        if self.conflicts:
            self.conflicts -= 1
            raise errors.Conflict(409, "Conflict", "stale")
        assert body["metadata"] == {"name": "n", "resourceVersion": "1"}
        self.node["spec"]["taints"] = body["spec"]["taints"]
        return self.node

    @property
    def keys(self) -> list[str]:
        return [taint["key"] for taint in self.node["spec"]["taints"]]


async def test_a_dead_node_is_tainted_once_beside_its_other_taints() -> None:
    server: Any = Server(GPU)
    server.conflicts = 1
    taints = OutOfServiceTaints(server)
    for _ in range(2):
        await taints.mark("n")
    assert server.keys == ["nvidia.com/gpu", TAINT_KEY]
    made = server.node["spec"]["taints"][1]
    assert (made["effect"], made["value"], made["timeAdded"]) == ("NoExecute", "everstep", "2026-01-01T12:00:00Z")
    assert server.writes == 2, "one, and the one that was stale"


async def test_a_node_keeps_the_taint_until_its_kubelet_reports_again() -> None:
    server: Any = Server(GPU)
    taints = OutOfServiceTaints(server)
    await taints.mark("n")
    for at, status, back in (
        ("2026-01-01T11:59:00Z", "True", False),  # what it said before it died
        ("2026-01-01T12:00:05Z", "True", False),  # by a clock that may be ahead
        ("2026-01-01T12:05:00Z", "False", False),
        ("odd", "True", False),
        ("2026-01-01T12:05:00Z", "True", True),
    ):
        server.report(at, status)
        assert parse_node(server.node).returned is back
        await taints.clear("n")
        assert server.keys == (["nvidia.com/gpu"] if back else ["nvidia.com/gpu", TAINT_KEY])
    assert not parse_node(server.node).returned


async def test_the_taint_of_somebody_else_is_left_alone() -> None:
    server: Any = Server(THEIRS)
    taints = OutOfServiceTaints(server)
    await taints.mark("n")
    server.report("2026-01-01T13:00:00Z")
    assert not parse_node(server.node).returned
    await taints.clear("n")
    assert server.node["spec"]["taints"] == [THEIRS]
    assert server.writes == 0


@pytest.mark.parametrize(
    "rejection",
    [
        errors.NotAuthorized(403, "Forbidden", 'User "x" cannot patch resource "nodes"'),
        errors.Forbidden(403, "Forbidden", "a webhook"),
    ],
)
async def test_a_rejection_holds_nothing_up(rejection: errors.ApiError) -> None:
    server: Any = Server()
    server.rejection = rejection
    await OutOfServiceTaints(server).mark("n")
    await OutOfServiceTaints(server).mark("gone")
    assert server.keys == []
