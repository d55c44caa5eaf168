"""Users change labels of running pods; whose a pod is, and which one, that does not change."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.app import Operator
from everstep_operator.cluster.resources import PODS
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import World, until


async def relabel(world: World, pod: str, **labels: str | None) -> None:
    await world._patch(
        PODS.path(world.namespace, pod),
        {"metadata": {"labels": {f"everstep.dev/{name}": value for name, value in labels.items()}}},
    )


async def after_resyncs(made: Operator, count: int) -> None:
    """The operator has listed everything so often, and planned by it."""
    for _ in range(count):
        before = made.resync.done_at

        async def listed(before: float | None = before) -> bool:
            return made.resync.done_at != before

        await until(listed, "a complete list", 120)
    await made.queue.idle()


def uids(pods: list[dict[str, Any]]) -> list[str]:
    return [pod["metadata"]["uid"] for pod in pods]


async def test_pods_without_their_label_go_on_as_before(control_plane: ControlPlane, still_world: World) -> None:
    async with (
        operator(control_plane.kubeconfig, still_world, resync_seconds=2.0) as (made, _),
        Simulation(still_world, "digits"),
    ):
        await still_world.submit("digits", numNodes=3)
        before = await still_world.until_phase("digits", "Running")
        pods = await still_world.pods("digits")
        for index in (0, 2):
            await relabel(still_world, f"digits-{index}", job=None)
        await after_resyncs(made, 4)
        status = (await still_world.job("digits"))["status"]
        assert (status["phase"], status["epoch"]) == ("Running", before["epoch"])
        assert status.get("restarts") == before.get("restarts")
        assert uids(await still_world.pods("digits")) == uids(pods)
        await still_world.remove(pods[0])

        async def replaced() -> bool:
            there = await still_world.pods("digits")
            return len(there) == 3 and there[0]["metadata"]["uid"] != pods[0]["metadata"]["uid"]

        await until(replaced, "pod 0 is replaced, when it is gone", 120)
        status = await still_world.until_phase("digits", "Running")
        assert status["epoch"] == before["epoch"] + 1
        assert uids(await still_world.pods("digits"))[1:] == uids(pods)[1:]


async def test_an_operator_that_starts_finds_pods_without_their_label(
    control_plane: ControlPlane, still_world: World
) -> None:
    async with Simulation(still_world, "digits"):
        async with operator(control_plane.kubeconfig, still_world):
            await still_world.submit("digits", numNodes=2)
            before = await still_world.until_phase("digits", "Running")
            pods = await still_world.pods("digits")
        await relabel(still_world, "digits-0", job=None)
        async with operator(control_plane.kubeconfig, still_world, resync_seconds=2.0) as (made, _):
            await after_resyncs(made, 3)
            status = (await still_world.job("digits"))["status"]
            assert (status["phase"], status["epoch"]) == ("Running", before["epoch"])
            assert uids(await still_world.pods("digits")) == uids(pods)


async def test_a_pod_without_its_label_is_suspended_too(control_plane: ControlPlane, still_world: World) -> None:
    """It would go on to hold its node and GPUs, and the job would say that it has no pods."""
    async with Simulation(still_world, "digits") as simulation:
        async with operator(control_plane.kubeconfig, still_world):
            await still_world.submit("digits", numNodes=2)
            await still_world.until_phase("digits", "Running")
        await relabel(still_world, "digits-1", job=None)
        await still_world.change("digits", suspend=True)
        async with operator(control_plane.kubeconfig, still_world, resync_seconds=2.0):
            await still_world.until_phase("digits", "Suspended", seconds=60)
            assert await still_world.pods("digits") == []
            await still_world.change("digits", suspend=False)
            await still_world.until_phase("digits", "Running", seconds=60)
            simulation.finish.set()
            await still_world.until_phase("digits", "Succeeded", seconds=60)


@pytest.mark.parametrize("labels", [{"index": None}, {"index": "7"}, {"template": "9"}, {"template": None}])
async def test_pods_with_other_labels_go_on_as_before(
    control_plane: ControlPlane, still_world: World, labels: dict[str, str | None]
) -> None:
    async with (
        operator(control_plane.kubeconfig, still_world, resync_seconds=2.0) as (made, _),
        Simulation(still_world, "digits"),
    ):
        await still_world.submit("digits", numNodes=2)
        before = await still_world.until_phase("digits", "Running")
        pods = await still_world.pods("digits")
        await relabel(still_world, "digits-1", **labels)
        await after_resyncs(made, 2)
        status = (await still_world.job("digits"))["status"]
        assert (status["phase"], status["epoch"]) == ("Running", before["epoch"])
        assert uids(await still_world.pods("digits")) == uids(pods)
