"""The taint of dead nodes on a real API server, by a user with the operator's rights only."""

from __future__ import annotations

import time
from typing import Any

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.out_of_service import OutOfServiceTaints
from everstep_operator.cluster.resources import NODES
from everstep_operator.plan.node_view import parse_node
from everstep_operator.plan.out_of_service import CLOCK_SECONDS, TAINT_KEY
from tests.integration.conftest import USER
from tests.integration.world import World


async def test_a_dead_node_is_tainted_and_loses_the_taint_when_its_kubelet_reports_again(
    control_plane: ControlPlane, world: World
) -> None:
    name = f"{world.namespace}-dead"
    await world.join(name)
    await world.taint(name, "example.com/gpu")
    client = await Client.connect(str(control_plane.user_kubeconfig(USER)))

    async def read_keys() -> list[Any]:
        node = await world.client.get(NODES, None, name)
        return sorted(taint["key"] for taint in node["spec"]["taints"])

    try:
        taints = OutOfServiceTaints(client)
        for _ in range(2):
            await taints.mark(name)
            assert await read_keys() == ["example.com/gpu", TAINT_KEY]
            await taints.clear(name)
        assert await read_keys() == ["example.com/gpu", TAINT_KEY], "it has said nothing since"
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 2 * CLOCK_SECONDS))
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": at}
        await world._patch(NODES.path(None, name) + "/status", {"status": {"conditions": [ready]}})
        assert parse_node(await client.get(NODES, None, name)).returned
        await taints.clear(name)
        assert await read_keys() == ["example.com/gpu"]
    finally:
        await client.close()
