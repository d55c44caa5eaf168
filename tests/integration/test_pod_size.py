"""A pod is lean as the API server stores it, with its bookkeeping of who has set which field."""

from __future__ import annotations

import json
from typing import Any

from everstep_operator.cluster.resources import PODS
from tests.integration.world import World

MAX_MANAGED_FIELDS, MAX_STORED = 2780, 6150  # bytes of compact JSON


def count_bytes(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())


async def test_a_stored_pod_is_lean(world: World) -> None:
    """Each event of each pod carries all of it, and etcd keeps it. A field that the operator sets costs twice: itself,
    and its path in managedFields. One more variable, volume or mount is some 150 bytes."""
    await world.submit("digits")
    (pod,) = await world.until_pods("digits", 1)
    stored = await world.client.get(PODS, world.namespace, pod["metadata"]["name"])
    fields = stored["metadata"]["managedFields"]
    assert [entry["manager"] for entry in fields] == ["everstep-operator"]
    parts = {name: count_bytes(stored[name]) for name in ("metadata", "spec", "status")}
    assert count_bytes(fields) <= MAX_MANAGED_FIELDS, parts
    assert count_bytes(stored) <= MAX_STORED, parts
