"""The operator is killed before and after each of its writes, loses answers, meets refusals: the job ends the same."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster.resources import CONFIG_MAPS, JOBS, PODS, SECRETS, SERVICES
from everstep_operator.plan.agent_volume import make_template_name
from tests.integration.inprocess import DEATHS, Fault, InjectedClient, Simulation, flaky, operator
from tests.integration.world import World, until

MOST_WRITES = 40
NODES = 2


async def as_if_nothing_had_happened(world: World, simulation: Simulation, job: str) -> None:
    status = (await world.job(job))["status"]
    assert status["phase"] == "Succeeded"
    # Where nobody could know whether the last epoch had got its pod 0, the next one was used: a gap is harmless.
    assert label((await world.pods(job))[0], "epoch") == str(status["epoch"])
    assert (status.get("restarts") or {}).get("total", 0) == 0
    assert len(simulation.pods_seen) == NODES, "a pod was made twice"
    assert [s["metadata"]["name"] for s in await world.all(SERVICES)] == [job]
    epoch = status["template"]["epoch"]
    (secret,) = [s for s in await world.all(SECRETS) if s["metadata"].get("ownerReferences")]
    assert secret["metadata"]["name"].startswith(f"{job}-{epoch}-")
    of_template = make_template_name(job, (await world.job(job))["metadata"]["uid"], epoch)
    assert [m["metadata"]["name"] for m in await world.all(CONFIG_MAPS)][:-1] == [of_template]  # the last: the agent


def label(pod: dict[str, Any], name: str) -> str:
    return str(pod["metadata"]["labels"][f"everstep.dev/{name}"])


async def clear(world: World) -> None:
    for resource in (JOBS, PODS, SERVICES, SECRETS, CONFIG_MAPS):
        for item in await world.all(resource):
            meta = item["metadata"]
            await world.client.delete(resource, world.namespace, meta["name"], uid=meta["uid"], grace=0)


async def over(world: World, job: str, client: InjectedClient) -> bool:
    """True when the job has succeeded, False when the operator died first."""

    async def check() -> bool:
        if client.died.is_set():
            return True
        return ((await world.job(job)).get("status") or {}).get("phase") == "Succeeded"

    await until(check, "the job has succeeded or the operator is dead")
    await asyncio.sleep(0.2)  # its last events
    return not client.died.is_set()


def at_write(number: int, how: str) -> Fault:
    return lambda n, method, path: how if n == number else None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", DEATHS)
async def test_killed_at_every_write(control_plane: ControlPlane, still_world: World, how: str) -> None:
    for at in range(1, MOST_WRITES):
        await still_world.submit("digits", numNodes=NODES)
        async with Simulation(still_world, "digits") as simulation:
            simulation.finish.set()
            async with operator(control_plane.kubeconfig, still_world, at_write(at, how)) as (_, client):
                done = await over(still_world, "digits", client)
            if not done:
                async with operator(control_plane.kubeconfig, still_world):
                    await still_world.until_phase("digits", "Succeeded")
            await as_if_nothing_had_happened(still_world, simulation, "digits")
        if done:
            assert at > 8, "the job took fewer writes than it has objects"
            return
        await clear(still_world)
    raise AssertionError(f"more than {MOST_WRITES} writes for one job")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [*DEATHS, "lose"])
async def test_killed_at_every_write_after_the_leaders_node_was_removed(
    control_plane: ControlPlane, still_world: World, how: str
) -> None:
    """The loss is charged once, and its pod is made once, under a new epoch."""
    gone = f"{still_world.namespace}-gone"
    for at in range(1, MOST_WRITES):
        await still_world.submit("digits", numNodes=NODES)
        async with Simulation(still_world, "digits", (gone, "n1")) as simulation:
            async with operator(control_plane.kubeconfig, still_world):
                await still_world.until_phase("digits", "Running")
            lost = (await still_world.pods("digits"))[0]["metadata"]["uid"]
            await still_world.leave(gone)
            async with operator(control_plane.kubeconfig, still_world, at_write(at, how)) as (_, client):
                await until(partial(replaced, still_world, lost, client), "the lost pod is replaced")
                simulation.finish.set()
                alive = not client.died.is_set() and await over(still_world, "digits", client)
            if not alive:
                simulation.finish.clear()
                async with operator(control_plane.kubeconfig, still_world):
                    await until(partial(replaced, still_world, lost), "the lost pod is replaced")
                    simulation.finish.set()
                    await still_world.until_phase("digits", "Succeeded")
        status = (await still_world.job("digits"))["status"]
        assert status["restarts"]["infrastructure"] == status["restarts"]["total"] == 1
        assert status["lastFailure"]["reason"] == "NodeLost"
        assert status["epoch"] >= 2
        assert len(simulation.pods_seen) == NODES + 1
        if alive and client.writes < at:
            assert at > 3, "fewer writes than a charge, a delete and a create"
            return
        await clear(still_world)
    raise AssertionError(f"more than {MOST_WRITES} writes for one lost pod")


async def replaced(world: World, lost: str, client: InjectedClient | None = None) -> bool:
    """Another pod 0 is there; or the operator has died."""
    if client is not None and client.died.is_set():
        return True
    pods = [pod for pod in await world.pods("digits") if label(pod, "index") == "0"]
    return bool(pods) and pods[0]["metadata"]["uid"] != lost


@pytest.mark.parametrize("seed", range(6))
async def test_lost_answers_and_refusals(control_plane: ControlPlane, still_world: World, seed: int) -> None:
    await still_world.submit("digits", numNodes=NODES)
    async with Simulation(still_world, "digits") as simulation:
        simulation.finish.set()
        async with operator(control_plane.kubeconfig, still_world, flaky(seed)):
            await still_world.until_phase("digits", "Succeeded", seconds=60)
        await as_if_nothing_had_happened(still_world, simulation, "digits")


async def test_a_strangers_secret_stays_whatever_is_lost(control_plane: ControlPlane, still_world: World) -> None:
    """It has the name of the job's template, and the answer to the first of each of the operator's creates is lost."""
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "digits-1"}, "stringData": {"mine": "yes"}}
    theirs = await still_world.client.create(SECRETS, still_world.namespace, body)
    asked: set[str] = set()

    def lose_first(number: int, method: str, path: str) -> str | None:
        first = method == "POST" and path not in asked
        asked.add(path)
        return "lose" if first else None

    await still_world.submit("digits", numNodes=NODES)
    async with Simulation(still_world, "digits") as simulation:
        simulation.finish.set()
        async with operator(control_plane.kubeconfig, still_world, lose_first):
            await still_world.until_phase("digits", "Succeeded", seconds=120)
        await as_if_nothing_had_happened(still_world, simulation, "digits")
    assert await still_world.client.get(SECRETS, still_world.namespace, "digits-1") == theirs
