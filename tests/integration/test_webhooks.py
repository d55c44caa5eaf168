"""Jobs beside admission webhooks of others: ones that never answer, and ones that change pods."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster.resources import PODS
from tests.integration.inprocess import Simulation, operator
from tests.integration.webhooks import MUTATING, VALIDATING, Review, Webhook, allow
from tests.integration.world import World, until
from tests.long_sweeps import only_in_long_sweeps

LIMITS = {"pending": "5s", "startup": "5s"}


@pytest.mark.parametrize("index", [0, *only_in_long_sweeps(1)])
async def test_a_webhook_that_never_answers_ends_no_job_that_has_run(
    control_plane: ControlPlane, still_world: World, index: int
) -> None:
    hangs = asyncio.Event()
    hook = Webhook(control_plane, still_world, VALIDATING, lambda _: allow() if not hangs.is_set() else None)
    async with operator(control_plane.kubeconfig, still_world), Simulation(still_world, "digits") as simulation:
        await still_world.submit("digits", numNodes=2, timeouts=LIMITS)
        await still_world.until_phase("digits", "Running")
        async with hook:
            hangs.set()
            (lost,) = [p for p in await still_world.pods("digits") if p["metadata"]["name"] == f"digits-{index}"]
            await still_world.client.delete(PODS, still_world.namespace, f"digits-{index}", uid=lost["metadata"]["uid"])

            async def told() -> bool:
                conditions = {c["type"]: c for c in (await still_world.job("digits"))["status"]["conditions"]}
                stalled = conditions["Stalled"]
                assert (stalled["status"], stalled["reason"]) == ("True", "AdmissionRejected"), stalled
                return hook.name in stalled["message"]

            await until(told, "the status names the webhook", 60)
            asked = len(hook.asked)

            async def tried_again() -> bool:
                return len(hook.asked) > asked

            await until(tried_again, "it is tried again, long after the limits", 60)
            hangs.clear()
            await still_world.until_phase("digits", "Running", seconds=60)
        simulation.finish.set()
        status = await still_world.until_phase("digits", "Succeeded")
        assert status["restarts"]["total"] == 1


async def test_a_new_job_waits_for_a_webhook_that_never_answers(
    control_plane: ControlPlane, still_world: World
) -> None:
    hangs = asyncio.Event()
    hangs.set()
    hook = Webhook(control_plane, still_world, VALIDATING, lambda _: allow() if not hangs.is_set() else None)
    async with hook, operator(control_plane.kubeconfig, still_world), Simulation(still_world, "digits"):
        await still_world.submit("digits", numNodes=2)

        async def told() -> bool:
            return hook.name in str((await still_world.job("digits")).get("status") or {})

        await until(told, "the status names the webhook", 60)
        assert (await still_world.job("digits"))["status"]["phase"] == "Pending"
        hangs.clear()
        await still_world.until_phase("digits", "Running", seconds=60)


def change_pod(review: Review) -> dict[str, Any]:
    """Change a pod as service meshes, secret injectors, cost and policy controllers do."""
    sidecar = {"name": "mesh", "image": "mesh", "resources": {"requests": {"cpu": "1"}}}
    return allow(
        {"op": "add", "path": "/spec/containers/0", "value": sidecar},
        {"op": "add", "path": "/spec/initContainers", "value": [{"name": "setup", "image": "mesh"}]},
        {"op": "add", "path": "/spec/containers/1/env/0", "value": {"name": "INJECTED", "value": "yes"}},
        {"op": "add", "path": "/spec/containers/1/resources", "value": {"limits": {"memory": "1Gi"}}},
        {"op": "add", "path": "/spec/volumes/0", "value": {"name": "certificates", "emptyDir": {}}},
        {"op": "add", "path": "/metadata/labels/mesh", "value": "on"},
        {"op": "add", "path": "/metadata/labels/everstep.dev~1epoch", "value": "77"},
        {"op": "add", "path": "/metadata/labels/everstep.dev~1index", "value": "5"},
        {"op": "add", "path": "/metadata/labels/everstep.dev~1template", "value": "9"},
        {"op": "add", "path": "/metadata/annotations", "value": {"mesh": "on"}},
        {"op": "add", "path": "/metadata/finalizers", "value": ["example.com/accounting"]},
        {"op": "add", "path": "/spec/priority", "value": 0},
        {"op": "add", "path": "/spec/schedulerName", "value": "another"},
    )


async def test_pods_that_a_webhook_changes_are_the_jobs_own(control_plane: ControlPlane, still_world: World) -> None:
    async with (
        Webhook(control_plane, still_world, MUTATING, change_pod, timeout_seconds=10),
        operator(control_plane.kubeconfig, still_world),
        Simulation(still_world, "digits") as simulation,
    ):
        await still_world.submit("digits", numNodes=2)
        await still_world.until_phase("digits", "Running")
        pods = await still_world.pods("digits")
        assert [len(pod["spec"]["containers"]) for pod in pods] == [2, 2]
        simulation.finish.set()
        status = await still_world.until_phase("digits", "Succeeded")
        assert status["epoch"] == 1
        assert not (status.get("restarts") or {}).get("total")
        assert len(simulation.pods_seen) == 2, "none was replaced"
        for pod in await still_world.pods("digits"):
            path = PODS.path(still_world.namespace, pod["metadata"]["name"])
            await still_world._patch(path, {"metadata": {"finalizers": None}})
