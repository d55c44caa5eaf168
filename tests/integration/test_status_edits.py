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
    "changed",
    [
        {"epoch": 0},
        {"epoch": None},
        {"epoch": 7},
        {"restarts": None},
        {"phase": "Failed"},
        {"template": {"plain": True}},
        {"template": {"epoch": 9}},
        None,
    ],
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


NOTICE = {"reason": "SpotInterruption", "nodes": ["n1"], "noticed": "2030-01-01T00:00:00Z"}
OLD_CHARGES = [{"id": f"0.{n}", "cause": "Preemption", "time": "2020-01-01T00:00:00Z"} for n in range(1, 65)]


async def apply_as_another(world: World, status: Any) -> None:
    """As `kubectl apply --server-side --subresource=status` does: its fields have a second owner from now on."""
    meta = {"name": "digits", "namespace": world.namespace}
    body = {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": meta, "status": status}
    path, query = JOBS.path(world.namespace, "digits") + "/status", [("fieldManager", "backup"), ("force", "true")]
    await world.client._send("patch", "x", "PATCH", path, query, body, "application/apply-patch+yaml")


async def forget_owners(world: World) -> None:
    """As tools do that copy objects: whatever is there belongs to a manager `before-first-apply` from now on."""
    await world._patch(JOBS.path(world.namespace, "digits"), {"metadata": {"managedFields": [{}]}})


async def test_what_a_status_tells_no_more_goes_though_another_manager_owns_it_too(
    control_plane: ControlPlane, still_world: World
) -> None:
    """Else a count of failed starts, which ended when ranks ran, would fail the job at its next one."""
    async with operator(control_plane.kubeconfig, still_world), Simulation(still_world, "digits") as simulation:
        await still_world.submit("digits", numNodes=2)
        await still_world.until_phase("digits", "Running")
        made = "2020-01-01T00:00:00Z"
        await apply_as_another(still_world, {"disruption": NOTICE, "startFailures": {"count": 4, "made": made}})

        async def told() -> bool:
            status = (await still_world.job("digits"))["status"]
            assert not {"disruption", "startFailures"} & set(status), status
            return True

        await until(told, "nothing is left of either")
        simulation.finish.set()
        status = await still_world.until_phase("digits", "Succeeded")
        assert status["restarts"]["total"] == 0


async def test_a_notice_is_withdrawn_though_the_owners_of_fields_were_forgotten(
    control_plane: ControlPlane, still_world: World
) -> None:
    async with (
        operator(control_plane.kubeconfig, still_world),
        Simulation(still_world, "digits", nodes=("m1", "m2"), saves=False) as simulation,
    ):
        await still_world.submit("digits", numNodes=2)
        await still_world.until_phase("digits", "Running")
        await still_world.taint("m2", "aws-node-termination-handler/spot-itn")

        async def noticed() -> bool:
            return "disruption" in (await still_world.job("digits"))["status"]

        await until(noticed, "the notice is on record")
        await forget_owners(still_world)
        await still_world.taint("m2")

        async def withdrawn() -> bool:
            return not await noticed()

        await until(withdrawn, "the notice is withdrawn")
        simulation.finish.set()
        status = await still_world.until_phase("digits", "Succeeded")
        assert status["restarts"]["total"] == 0


async def test_a_full_list_of_charges_that_another_manager_owns_too_takes_one_more(
    control_plane: ControlPlane, still_world: World
) -> None:
    async with operator(control_plane.kubeconfig, still_world), Simulation(still_world, "digits") as simulation:
        await still_world.submit("digits", numNodes=2)
        await still_world.until_phase("digits", "Running")
        await apply_as_another(still_world, {"restarts": {"total": 64, "preemption": 64, "charges": OLD_CHARGES}})
        await lose(still_world, 1)

        async def charged() -> bool:
            restarts = (await still_world.job("digits"))["status"]["restarts"]
            assert restarts["total"] == 65, restarts["total"]
            assert len(restarts["charges"]) == 64
            return True

        await until(charged, "the loss is charged")
        simulation.finish.set()
        await still_world.until_phase("digits", "Succeeded")
