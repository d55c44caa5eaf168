"""The CRDs are not of the operator's own version: an upgrade brings them first, or somebody else installs them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster import errors
from everstep_operator.cluster.resources import JOBS, PODS
from tests.integration.conftest import CRDS
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import World, until

NAME = "trainingjobs.everstep.dev"


Schema = dict[str, Any]


@contextlib.asynccontextmanager
async def other_crds(world: World, change: Callable[[Schema], None], probe: Schema) -> AsyncIterator[None]:
    """CRDs of jobs in which `change` has changed the properties of a job; `probe` is a field that only they have in its
    spec, by which a test knows what is served."""
    path = CRDS.path(None, NAME)
    before = (await world.client.get(CRDS, None, NAME))["spec"]["versions"]
    after = copy.deepcopy(before)
    properties = after[0]["schema"]["openAPIV3Schema"]["properties"]
    properties["spec"]["properties"] |= probe
    change(properties)
    job = {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "probe"}}

    async def is_served(wanted: bool) -> bool:
        body = {**job, "spec": {"image": "i", **dict.fromkeys(probe, "new")}}
        made = await world.client.create(JOBS, world.namespace, body, dry_run=True)
        return bool((set(probe) <= set(made["spec"])) is wanted)

    async def serve(versions: Any, wanted: bool) -> None:
        await world._patch(path, {"spec": {"versions": versions}})

        async def served() -> bool:
            with contextlib.suppress(errors.Invalid):  # strict: the field is unknown
                return await is_served(wanted)
            return not wanted

        await until(served, "these CRDs are served")

    await serve(after, True)
    try:
        yield
    finally:
        await serve(before, False)


def newer_crds(world: World) -> contextlib.AbstractAsyncContextManager[None]:
    """CRDs with one more field in the spec of jobs, and a default for it."""
    return other_crds(world, lambda _: None, {"later": {"type": "string", "default": "new"}})


def older_crds(world: World) -> contextlib.AbstractAsyncContextManager[None]:
    """CRDs that lack some of the status."""

    def change(properties: Schema) -> None:
        status = properties["status"]["properties"]
        for name in ("nodes", "timings", "startFailures"):
            del status[name]
        del status["template"]["properties"]["specHash"]
        del status["conditions"]["items"]["properties"]["observedGeneration"]
        del status["transitions"]["items"]["properties"]["end"]
        status["conditions"]["items"]["properties"]["type"]["enum"].remove("Degraded")

    return other_crds(world, change, {"older": {"type": "string"}})


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


async def test_an_operator_over_older_crds_writes_what_they_know_of_a_status(
    control_plane: ControlPlane, still_world: World
) -> None:
    """The API server rejects a whole apply for one field that it does not know."""
    async with older_crds(still_world):
        async with operator(control_plane.kubeconfig, still_world), Simulation(still_world, "digits") as simulation:
            await still_world.submit("digits", numNodes=2)
            await still_world.until_phase("digits", "Running", seconds=60)
            (lost,) = [p for p in await still_world.pods("digits") if p["metadata"]["name"] == "digits-0"]
            await still_world.client.delete(PODS, still_world.namespace, "digits-0", uid=lost["metadata"]["uid"])

            async def restarted() -> bool:
                status = (await still_world.job("digits"))["status"]
                return bool(status["restarts"]["total"] == 1 and status["phase"] == "Running")

            await until(restarted, "the pod is replaced", 60)
            simulation.finish.set()
            status = await still_world.until_phase("digits", "Succeeded", seconds=60)
        assert "timings" not in status
        assert {"Ready", "Complete"} <= {condition["type"] for condition in status["conditions"]}
        assert status["template"] == {"epoch": 1, "plain": False, "pool": "", "onDemandPool": ""}
        assert all("end" not in transition for transition in status["transitions"])


async def test_a_job_that_older_crds_admitted_says_in_its_status_which_rule_it_breaks(
    control_plane: ControlPlane, still_world: World
) -> None:
    def change(properties: Schema) -> None:
        del properties["spec"]["properties"]["numNodes"]["minimum"]

    async with other_crds(still_world, change, {"older": {"type": "string"}}):
        await still_world.submit("digits", numNodes=0)
    async with operator(control_plane.kubeconfig, still_world), Simulation(still_world, "digits"):

        async def told() -> bool:
            conditions = (await still_world.job("digits")).get("status", {}).get("conditions", ())
            states = {each["type"]: (each["status"], each["reason"]) for each in conditions}
            assert states == {"Ready": ("False", "SpecInvalid"), "Stalled": ("True", "SpecInvalid")}, states
            return all("numNodes" in each["message"] for each in conditions)

        await until(told, "the conditions name the field")
        await still_world.change("digits", suspend=True, numNodes=1)
        await still_world.until_phase("digits", "Suspended")
        await still_world.change("digits", suspend=False)
        status = await still_world.until_phase("digits", "Running")
        assert not [each for each in status["conditions"] if each["reason"] == "SpecInvalid"]
