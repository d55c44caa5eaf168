"""Jobs in two pools on a real API server: which pods are where, who leads, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster import errors
from everstep_operator.cluster.resources import CONFIG_MAPS, POOLS
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import World, until


async def make_pool(world: World, kind: str, **spec: Any) -> str:
    name = f"{world.namespace}-{kind}"
    body = {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "TrainingPool",
        "metadata": {"name": name},
        "spec": {"nodeSelector": {"pool": name}, "capacityType": kind, **spec},
    }
    await world.client.create(POOLS, None, body)
    return name


async def find_pools(world: World) -> list[tuple[str, str]]:
    """Return of each pod the pool that it was made for, and the capacity type it bears."""
    return [
        (pod["spec"]["nodeSelector"]["pool"], pod["metadata"]["labels"]["everstep.dev/capacity-type"])
        for pod in await world.pods("digits")
    ]


async def test_the_first_pods_stay_on_demand_through_losses_and_operators_and_the_cost_goes_on(
    control_plane: ControlPlane, still_world: World
) -> None:
    world = still_world
    spot = await make_pool(world, "spot", pricePerHour=1, onDemandPricePerHour=3.5)
    demand = await make_pool(world, "on-demand", pricePerHour=3)
    placed = [(demand, "on-demand"), (spot, "spot"), (spot, "spot")]
    pools = [{"name": spot}, {"name": demand}]
    async with Simulation(world, "digits", step=5):
        async with operator(control_plane.kubeconfig, world):
            await world.submit("digits", numNodes=3, minOnDemand=1, pools=pools)
            await world.until_phase("digits", "Running")
            assert await find_pools(world) == placed
            status = (await world.job("digits"))["status"]
            assert (status["template"]["pool"], status["template"]["onDemandPool"]) == (spot, demand)

            async def is_booked() -> Any:
                return (await world.job("digits"))["status"].get("usage")

            before = await until(is_booked, "nodes are counted")
        async with operator(control_plane.kubeconfig, world):
            for index in (0, 2):
                old = (await world.pods("digits"))[index]
                await world.remove(old)

                async def is_replaced(gone: str = old["metadata"]["uid"]) -> bool:
                    uids = {pod["metadata"]["uid"] for pod in await world.pods("digits")}
                    return len(uids) == 3 and gone not in uids

                await until(is_replaced, "the pod is replaced")
                await world.until_phase("digits", "Running", seconds=60)
            assert await find_pools(world) == placed
            await world.change("digits", suspend=True)
            status = await world.until_phase("digits", "Suspended", seconds=60)
    after = status["usage"]
    assert after["spotNodeSeconds"] > before["spotNodeSeconds"]
    assert after["onDemandNodeSeconds"] > before["onDemandNodeSeconds"]
    hours = {name: after[f"{name}NodeSeconds"] / 3600 for name in ("spot", "onDemand")}
    assert after["cost"] == pytest.approx(hours["spot"] * 1 + hours["onDemand"] * 3, rel=0.01)
    assert after["savings"] == pytest.approx(hours["spot"] * 2.5, rel=0.01)
    assert (after["spotNodes"], after["onDemandNodes"], after["unpricedNodeSeconds"]) == (0, 0, 0)


async def test_a_template_of_two_pools_that_was_deleted_is_made_again_for_both(
    control_plane: ControlPlane, still_world: World
) -> None:
    world = still_world
    spot, demand = await make_pool(world, "spot"), await make_pool(world, "on-demand")
    async with Simulation(world, "digits"):
        async with operator(control_plane.kubeconfig, world):
            pools = [{"name": spot}, {"name": demand}]
            await world.submit("digits", numNodes=2, minOnDemand=1, pools=pools)
            await world.until_phase("digits", "Running")
        (stored,) = [item for item in await world.all(CONFIG_MAPS) if "template.json" in item.get("data", {})]
        assert "on-demand.json" in stored["data"]
        await world.client.delete(CONFIG_MAPS, world.namespace, stored["metadata"]["name"], uid=None)
        await world.remove((await world.pods("digits"))[0])
        async with operator(control_plane.kubeconfig, world):

            async def is_whole() -> bool:
                return await find_pools(world) == [(demand, "on-demand"), (spot, "spot")]

            await until(is_whole, "pod 0 is made for the on-demand pool again")


async def test_the_api_server_rejects_what_cannot_be(world: World) -> None:
    pools = [{"name": "any"}]
    for spec, said in (
        ({"numNodes": 2, "minOnDemand": 3, "pools": pools}, "it must be at most numNodes"),
        ({"numNodes": 2, "minOnDemand": 1}, "minOnDemand needs pools"),
    ):
        with pytest.raises(errors.Invalid, match=said):
            await world.submit("digits", **spec)
