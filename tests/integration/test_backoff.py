"""A job that cannot go on is tried again after growing pauses, whatever its own status writes bring about."""

from __future__ import annotations

import asyncio

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster.resources import EVENTS, PODS
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import World, until


class FailingCreates:
    """Answers 500 to each create of one plural, and notes when statuses are written."""

    def __init__(self, plural: str) -> None:
        self.plural = plural
        self.fails = True
        self.statuses: list[float] = []

    def __call__(self, number: int, method: str, path: str) -> str | None:
        if path.endswith("/status"):
            self.statuses.append(asyncio.get_running_loop().time())
        return "refuse" if self.fails and method == "POST" and path.endswith(f"/{self.plural}") else None


async def attempts(fault: FailingCreates, number: int) -> list[float]:
    """Wait for so many status writes; return the seconds between them."""

    async def seen() -> bool:
        return len(fault.statuses) >= number

    await until(seen, f"{number} status writes", 120)
    return [after - before for before, after in zip(fault.statuses, fault.statuses[1:], strict=False)]


async def test_a_first_set_that_cannot_be_made_is_tried_again_after_growing_pauses(
    control_plane: ControlPlane, still_world: World
) -> None:
    fault = FailingCreates("services")
    async with operator(control_plane.kubeconfig, still_world, fault):
        await still_world.submit("digits", numNodes=2)
        pauses = await attempts(fault, 7)
        # The fifth failure in a row waits at least half of 0.1 × 2⁴ s, the sixth half of 0.1 × 2⁵ s.
        assert pauses[5] >= 0.75, pauses
        fault.fails = False
        await still_world.until_pods("digits", 2)


async def test_a_lost_leader_that_cannot_be_replaced_is_tried_again_after_growing_pauses(
    control_plane: ControlPlane, still_world: World
) -> None:
    fault = FailingCreates("pods")
    fault.fails = False
    async with (
        operator(control_plane.kubeconfig, still_world, fault),
        Simulation(still_world, "digits"),
    ):
        await still_world.submit("digits", numNodes=2)
        await still_world.until_phase("digits", "Running")
        fault.fails = True
        fault.statuses.clear()
        zero = next(pod for pod in await still_world.pods("digits") if pod["metadata"]["name"] == "digits-0")
        await still_world.client.delete(PODS, still_world.namespace, "digits-0", uid=zero["metadata"]["uid"])
        await attempts(fault, 8)
        pauses = await attempts(fault, 9)
        assert max(pauses) >= 0.75, pauses
        fault.fails = False
        await still_world.until_phase("digits", "Running")


async def test_users_are_told_once_why_a_job_does_not_go_on(control_plane: ControlPlane, still_world: World) -> None:
    fault = FailingCreates("services")
    async with operator(control_plane.kubeconfig, still_world, fault):
        await still_world.submit("digits", numNodes=2)

        async def told() -> list[str]:
            return [e["message"] for e in await still_world.all(EVENTS) if e["reason"] == "Retrying"]

        (message,) = await until(told, "the event", 60)
        assert "injected" in message
        await attempts(fault, len(fault.statuses) + 2)
        assert len(await told()) == 1


async def test_an_invalid_template_fails_the_job_though_its_first_dry_run_met_a_server_in_trouble(
    control_plane: ControlPlane, still_world: World
) -> None:
    fault = FailingCreates("pods")
    template = {"spec": {"tolerations": [{"key": "a", "operator": "Perhaps"}]}}
    async with operator(control_plane.kubeconfig, still_world, fault):
        await still_world.submit("digits", numNodes=2, podTemplate=template)
        await attempts(fault, 2)
        fault.fails = False
        status = await still_world.until_phase("digits", "Failed")
        assert status["transitions"][-1]["reason"] == "InvalidTemplate"
