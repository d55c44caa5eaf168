"""An upgrade brings the CRDs first: the operator from before it keeps the jobs that run, and starts none."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster.resources import JOBS, PODS
from tests.integration.conftest import CRDS
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import World, until

NAME = "trainingjobs.everstep.dev"
FIELD = {"type": "string", "default": "new"}


@contextlib.asynccontextmanager
async def newer_crds(world: World) -> AsyncIterator[None]:
    """CRDs with one more field in the spec of jobs, and a default for it."""
    path = CRDS.path(None, NAME)
    before = (await world.client.get(CRDS, None, NAME))["spec"]

    def with_field(field: Any) -> Any:
        (version,) = before["versions"]
        schema = version["schema"]["openAPIV3Schema"]
        spec = schema["properties"]["spec"]
        properties = {name: value for name, value in spec["properties"].items() if name != "later"}
        spec = {**spec, "properties": {**properties, **({"later": field} if field else {})}}
        schema = {**schema, "properties": {**schema["properties"], "spec": spec}}
        return {"spec": {"versions": [{**version, "schema": {"openAPIV3Schema": schema}}]}}

    async def is_served(wanted: bool) -> bool:
        probe = {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "probe"}}
        made = await world.client.create(JOBS, world.namespace, {**probe, "spec": {"image": "i"}}, dry_run=True)
        return bool(("later" in made["spec"]) is wanted)

    await world._patch(path, with_field(FIELD))
    try:
        await until(lambda: is_served(True), "the newer CRDs are served")
        yield
    finally:
        await world._patch(path, with_field(None))
        await until(lambda: is_served(False), "the former CRDs are served")


async def test_an_operator_under_newer_crds_keeps_what_runs_and_starts_nothing(
    control_plane: ControlPlane, still_world: World
) -> None:
    async with operator(control_plane.kubeconfig, still_world), Simulation(still_world, "digits") as simulation:
        await still_world.submit("digits", numNodes=2)
        await still_world.until_phase("digits", "Running")
        async with newer_crds(still_world):
            for index in (1, 0):
                (lost,) = [p for p in await still_world.pods("digits") if p["metadata"]["name"] == f"digits-{index}"]
                meta = lost["metadata"]
                await still_world.client.delete(PODS, still_world.namespace, meta["name"], uid=meta["uid"])

                async def replaced(meta: Any = meta) -> bool:
                    pods = {p["metadata"]["name"]: p["metadata"]["uid"] for p in await still_world.pods("digits")}
                    return bool(pods.get(meta["name"], meta["uid"]) != meta["uid"])

                await until(replaced, f"{meta['name']} is replaced", 60)
                await still_world.until_phase("digits", "Running", seconds=60)
            await still_world.submit("waits", numNodes=1)

            async def waits() -> bool:
                status = (await still_world.job("waits")).get("status") or {}
                stalled = {c["type"]: c for c in status.get("conditions", ())}["Stalled"]
                assert (stalled["status"], stalled["reason"]) == ("True", "UnknownFields"), status
                assert "spec.later" in stalled["message"], "which one"
                return True

            await until(lambda: _when_judged(still_world, waits), "the new job says why it waits", 60)
            assert await still_world.pods("waits") == []
            simulation.finish.set()
            status = await still_world.until_phase("digits", "Succeeded")
            assert status["restarts"]["total"] == 2
        await still_world.until_pods("waits", 1)  # nothing has changed it: it reads differently


async def _when_judged(world: World, check: Any) -> bool:
    status = (await world.job("waits")).get("status") or {}
    assert status.get("conditions"), "nobody has looked yet"
    return bool(await check())
