"""Two operators at once, neither of which knows of the other: the Lease forbids it, and nothing breaks if it fails."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster import errors
from everstep_operator.cluster.resources import EVENTS, PODS
from everstep_operator.plan.observation import parse_pod
from tests.integration.inprocess import Simulation, flaky, operator
from tests.integration.world import World

NODES = 3
PLENTY = {"infrastructure": 1000, "application": 1000}


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(6))
async def test_a_job_survives_two_operators_that_are_killed_and_lose_answers_while_its_pods_are_deleted(
    control_plane: ControlPlane, still_world: World, seed: int
) -> None:
    chance = random.Random(seed)
    leaders: dict[int, set[str]] = defaultdict(set)  # UIDs of the pods 0 of each epoch

    async def operate(number: int) -> None:
        while True:
            fault = flaky(10 * seed + number, share=0.1, budget=10_000)
            async with operator(control_plane.kubeconfig, still_world, fault):
                await asyncio.sleep(chance.uniform(1, 6))

    async def note_leaders() -> None:
        while True:
            for pod in map(parse_pod, await still_world.pods("digits")):
                if pod.index == 0:
                    leaders[pod.epoch].add(pod.uid)
            await asyncio.sleep(0.1)

    async with Simulation(still_world, "digits") as simulation, asyncio.TaskGroup() as group:
        await still_world.submit("digits", numNodes=NODES, restart=PLENTY)
        tasks = [group.create_task(work) for work in (operate(1), operate(2), note_leaders())]
        await still_world.until_phase("digits", "Running", seconds=60)
        for _ in range(8):
            await asyncio.sleep(chance.uniform(0.2, 3))
            for index in chance.sample(range(NODES), chance.choice([1, 1, 2])):
                grace = chance.choice([0, None])
                with contextlib.suppress(errors.ApiError):
                    await still_world.client.delete(
                        PODS, still_world.namespace, f"digits-{index}", uid=None, grace=grace
                    )
        await still_world.until_phase("digits", "Running", seconds=60)
        simulation.finish.set()
        await still_world.until_phase("digits", "Succeeded", seconds=60)
        for task in tasks:
            task.cancel()
    assert all(len(uids) == 1 for uids in leaders.values()), "two leaders of one epoch"
    assert not [e for e in await still_world.all(EVENTS) if e["reason"] == "StatusRestored"], "they undo each other"
