"""The words with which a real API server rejects pods for a quota tell how many it could ever admit, and a quota that
is used up by what a job has does not keep a lost pod from being replaced."""

from __future__ import annotations

import contextlib
from typing import Any

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster import errors
from everstep_operator.cluster.resources import CONFIG_MAPS, PODS, ApiResource
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import World, until

QUOTAS = ApiResource("", "v1", "resourcequotas", "ResourceQuota")


async def test_a_set_that_is_larger_than_its_quota_is_known_to_be(
    control_plane: ControlPlane, still_world: World
) -> None:
    hard = {"pods": "4"}
    quota: dict[str, Any] = {"metadata": {"name": "small"}, "spec": {"hard": hard}}
    await still_world.client.create(QUOTAS, still_world.namespace, quota)
    used = {"status": {"hard": hard, "used": {"pods": "0"}}}  # there is no quota controller that would count
    await still_world._patch(QUOTAS.path(still_world.namespace, "small") + "/status", used)
    async with operator(control_plane.kubeconfig, still_world) as (made, _):
        await still_world.submit("digits", numNodes=6)

        async def blocked() -> bool:
            (view,) = made.gangs.list_views() or (None,)
            return view is not None and bool(view.quota)

        await until(blocked, "the quota blocks the set", 60)
        (view,) = made.gangs.list_views()
        assert (view.places, view.possible, view.scheduled) == (4, False, 4)
        status = (await still_world.job("digits"))["status"]
        assert status["transitions"][-1]["reason"] == "QuotaExceeded"
        assert "limited: pods=4" in status["conditions"][0]["message"]


async def test_a_quota_whose_use_is_not_counted_yet_fails_no_new_job(
    control_plane: ControlPlane, still_world: World
) -> None:
    """Applied together, as many tools do. The quota controller is slower, and until then admission rejects all pods."""
    hard = {"pods": "4"}
    quota: dict[str, Any] = {"metadata": {"name": "new"}, "spec": {"hard": hard}}
    await still_world.client.create(QUOTAS, still_world.namespace, quota)
    path = QUOTAS.path(still_world.namespace, "new") + "/status"
    await still_world._patch(path, {"status": {"hard": hard}})

    async def known() -> bool:
        with contextlib.suppress(errors.Forbidden):
            body = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "a", "image": "b"}]}}
            await still_world.client.create(PODS, still_world.namespace, body, dry_run=True)
            return False
        return True

    await until(known, "admission knows the quota")
    async with operator(control_plane.kubeconfig, still_world), Simulation(still_world, "digits"):
        await still_world.submit("digits", numNodes=2)

        async def told() -> bool:
            return "status unknown for quota: new" in str((await still_world.job("digits")).get("status") or {})

        await until(told, "the status says what the job waits for", 60)
        assert (await still_world.job("digits"))["status"]["phase"] == "Pending"
        await still_world._patch(path, {"status": {"hard": hard, "used": {"pods": "0"}}})
        await still_world.until_phase("digits", "Running", seconds=90)


async def test_a_quota_that_a_running_job_s_own_objects_use_up_lets_its_pods_be_replaced(
    control_plane: ControlPlane, still_world: World
) -> None:
    """A quota is asked before the API server looks whether an object is there already."""
    async with operator(control_plane.kubeconfig, still_world), Simulation(still_world, "digits") as simulation:
        await still_world.submit("digits", numNodes=2)
        await still_world.until_phase("digits", "Running")
        maps = len(await still_world.all(CONFIG_MAPS))
        hard = {"services": "1", "secrets": "1", "configmaps": str(maps), "count/pods": "9"}
        quota: dict[str, Any] = {"metadata": {"name": "full"}, "spec": {"hard": hard}}
        await still_world.client.create(QUOTAS, still_world.namespace, quota)
        used = {"status": {"hard": hard, "used": {**hard, "count/pods": "2"}}}
        await still_world._patch(QUOTAS.path(still_world.namespace, "full") + "/status", used)

        async def enforced() -> bool:
            with contextlib.suppress(errors.QuotaExceeded):
                body = {"metadata": {"name": "one-more"}}
                await still_world.client.create(CONFIG_MAPS, still_world.namespace, body, dry_run=True)
                return False
            return True

        await until(enforced, "the quota is enforced")
        for index in (1, 0):
            (lost,) = [p for p in await still_world.pods("digits") if p["metadata"]["name"] == f"digits-{index}"]
            await still_world.client.delete(PODS, still_world.namespace, f"digits-{index}", uid=lost["metadata"]["uid"])

            async def replaced(index: int = index, uid: str = lost["metadata"]["uid"]) -> bool:
                pods = {p["metadata"]["name"]: p["metadata"]["uid"] for p in await still_world.pods("digits")}
                return bool(pods.get(f"digits-{index}", uid) != uid)

            await until(replaced, "the pod is replaced", 60)
            await still_world.until_phase("digits", "Running", seconds=60)
        simulation.finish.set()
        status = await still_world.until_phase("digits", "Succeeded")
        assert not [t for t in status["transitions"] if t["reason"] == "QuotaExceeded"]
