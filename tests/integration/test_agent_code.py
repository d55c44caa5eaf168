"""The agent's code is what a job was started with, under an operator that has another one."""

from __future__ import annotations

import base64
from typing import Any

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster.resources import CONFIG_MAPS
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import World, until


async def replace_code(world: World, config_map: dict[str, Any], code: bytes) -> None:
    """Put a ConfigMap with this code in the place of an agent, as anybody can who may write ConfigMaps."""
    name = config_map["metadata"]["name"]
    meta = {"name": name, "labels": config_map["metadata"]["labels"]}
    await world.client.delete(CONFIG_MAPS, world.namespace, name, uid=None)
    body = {**config_map, "metadata": meta, "binaryData": {"agent.pyz": base64.b64encode(code).decode()}}
    await world.client.create(CONFIG_MAPS, world.namespace, body)


async def test_no_replacement_runs_other_code_under_the_name_of_an_older_agent(
    control_plane: ControlPlane, still_world: World
) -> None:
    await still_world.submit("digits", numNodes=2)
    async with Simulation(still_world, "digits") as simulation:
        async with operator(control_plane.kubeconfig, still_world):
            await still_world.until_phase("digits", "Running", seconds=120)
        (agent,) = [m for m in await still_world.all(CONFIG_MAPS) if m["metadata"]["name"].startswith("everstep-agent")]
        await replace_code(still_world, agent, b"evil")
        async with operator(control_plane.kubeconfig, still_world, agent=b"next"):
            await still_world.remove((await still_world.pods("digits"))[1])

            async def stalled() -> dict[str, Any] | None:
                conditions = (await still_world.job("digits"))["status"]["conditions"]
                return next((c for c in conditions if (c["type"], c["status"]) == ("Stalled", "True")), None)

            condition = await until(stalled, "the job says what is in the way", 120)
            assert condition is not None
            assert agent["metadata"]["name"] in condition["message"]
            assert len(await still_world.pods("digits")) == 1

            await replace_code(still_world, agent, base64.b64decode(agent["binaryData"]["agent.pyz"]))
            await still_world.until_pods("digits", 2, seconds=180)
            simulation.finish.set()
            await still_world.until_phase("digits", "Succeeded", seconds=120)
