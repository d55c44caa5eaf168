"""A status, or a pod's label, that somebody edits loses no job and gives no epoch out twice."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster.resources import EVENTS, JOBS, PODS
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import World, until


async def lose(world: World, index: int) -> None:
    """Delete a pod, and wait until another one has its place."""
    (pod,) = [each for each in await world.pods("digits") if each["metadata"]["name"] == f"digits-{index}"]
    uid = pod["metadata"]["uid"]
    await world.client.delete(PODS, world.namespace, f"digits-{index}", uid=uid)

    async def replaced() -> bool:
        return all(
            each["metadata"]["uid"] != uid and "deletionTimestamp" not in each["metadata"]
            for each in await world.until_pods("digits", 2)
        )

    await until(replaced, "the pod is replaced")


async def edit(world: World, status: Any) -> None:
    """As `kubectl edit --subresource=status` does; null removes a field."""
    await world._patch(JOBS.path(world.namespace, "digits") + "/status", {"status": status})


@pytest.mark.parametrize(
    "changed", [{"epoch": 0}, {"epoch": None}, {"epoch": 7}, {"restarts": None}, {"phase": "Failed"}, None]
)
@pytest.mark.parametrize("index", [0, 1])
async def test_an_edited_status_loses_no_job(
    control_plane: ControlPlane, still_world: World, changed: Any, index: int
) -> None:
    async with (
        operator(control_plane.kubeconfig, still_world),
        Simulation(still_world, "digits") as simulation,
    ):
        await still_world.submit("digits", numNodes=2, restart={"infrastructure": 4})
        for _ in range(3):
            await still_world.until_phase("digits", "Running")
            await lose(still_world, 0)
        status = await still_world.until_phase("digits", "Running")
        assert status["epoch"] == 4
        pods = [pod["metadata"]["uid"] for pod in await still_world.pods("digits")]
        await edit(still_world, changed)

        async def put_right() -> bool:
            found = (await still_world.job("digits")).get("status") or {}
            assert found.get("phase") == "Running", found
            assert found.get("epoch", 0) >= 4, found
            assert found.get("restarts", {}).get("total") == 3, found
            return True

        await until(put_right, "the status is as it was")
        assert [pod["metadata"]["uid"] for pod in await still_world.pods("digits")] == pods
        await lose(still_world, index)
        status = await still_world.until_phase("digits", "Running")
        assert status["epoch"] >= 4 + (index == 0)
        simulation.finish.set()
        status = await still_world.until_phase("digits", "Succeeded")
        assert status["restarts"]["total"] == 4
        told = [event for event in await still_world.all(EVENTS) if event["reason"] == "StatusRestored"]
        assert len(told) == (changed != {"epoch": 7})


@pytest.mark.parametrize("epoch", ["1", "7", None])
async def test_an_edited_label_of_pod_0_loses_no_job(
    control_plane: ControlPlane, still_world: World, epoch: str | None
) -> None:
    async with (
        operator(control_plane.kubeconfig, still_world),
        Simulation(still_world, "digits") as simulation,
    ):
        await still_world.submit("digits", numNodes=2)
        await still_world.until_phase("digits", "Running")
        await lose(still_world, 0)
        await still_world.until_phase("digits", "Running")
        labels = {"metadata": {"labels": {"everstep.dev/epoch": epoch}}}
        await still_world._patch(PODS.path(still_world.namespace, "digits-0"), labels)
        await lose(still_world, 1)
        status = await still_world.until_phase("digits", "Running")
        assert (status["epoch"], status["restarts"]["total"]) == (2, 2)
        assert not [c for c in status["conditions"] if c["type"] == "Degraded" and c["status"] == "True"]
        simulation.finish.set()
        await still_world.until_phase("digits", "Succeeded")
