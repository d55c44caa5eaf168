"""The words with which a real API server rejects pods for a quota tell how many it could ever admit."""

from __future__ import annotations

from typing import Any

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster.resources import ApiResource
from tests.integration.inprocess import operator
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
            (view,) = made.gangs.others(("", "")) or (None,)
            return view is not None and bool(view.quota)

        await until(blocked, "the quota blocks the set", 60)
        (view,) = made.gangs.others(("", ""))
        assert (view.places, view.possible, view.scheduled) == (4, False, 4)
        status = (await still_world.job("digits"))["status"]
        assert status["transitions"][-1]["reason"] == "QuotaExceeded"
        assert "limited: pods=4" in status["conditions"][0]["message"]
