"""A node that is announced to go away, as a real API server tells of it, and an operator that dies on the way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster.resources import CONFIG_MAPS, EVENTS, JOBS, PODS, SECRETS, SERVICES
from tests.integration.inprocess import Fault, InjectedClient, Simulation, operator
from tests.integration.world import World, until
from tests.long_sweeps import only_in_long_sweeps

SPOT = "aws-node-termination-handler/spot-itn"
MOST_WRITES = 30
STEP = 40


def simulate(world: World, **fields: Any) -> Simulation:
    names = [f"{world.namespace}-{name}" for name in ("head", "doomed", "spare")]
    return Simulation(world, "digits", (names[0], names[1]), spare=names[2], step=STEP, **fields)


async def running(world: World, simulation: Simulation) -> list[dict[str, Any]]:
    await world.submit("digits", numNodes=2, restart={"infrastructure": 0})
    await world.until_phase("digits", "Running")

    async def told() -> bool:
        return bool(((await world.job("digits"))["status"].get("progress") or {}).get("step") == STEP)

    await until(told, "the step of the ranks")
    return await world.pods("digits")


async def elsewhere(world: World, index: int, node: str, client: InjectedClient | None = None) -> bool:
    """Ranks run again, with this pod on another node; or the operator has died."""
    if client is not None and client.died.is_set():
        return True
    job, pods = await world.job("digits"), await world.pods("digits")
    if len(pods) != 2 or pods[index]["spec"].get("nodeName") in (None, node):
        return False
    return bool(job["status"]["phase"] == "Running" and not job["status"].get("disruption"))


async def reasons(world: World) -> set[str]:
    return {str(event["reason"]) for event in await world.all(EVENTS)}


async def clear(world: World) -> None:
    for resource in (JOBS, PODS, SERVICES, SECRETS, CONFIG_MAPS):
        for item in await world.all(resource):
            meta = item["metadata"]
            await world.client.delete(resource, world.namespace, meta["name"], uid=meta["uid"], grace=0)


async def test_a_spot_notice_becomes_a_checkpoint_and_a_pod_elsewhere_for_free(world: World) -> None:
    async with simulate(world, saves=False) as simulation:
        before = await running(world, simulation)
        doomed = simulation.nodes[1]
        await world.taint(doomed, SPOT)

        async def asked() -> dict[str, Any] | None:
            return (await world.job("digits"))["status"].get("disruption") if simulation.requested else None

        known = await until(asked, "the leader is asked, and the status says for what")
        assert known is not None
        assert (known["reason"], known["nodes"]) == ("SpotInterruption", [doomed])
        (leader,) = simulation.leaders.values()
        body = leader.asked("checkpoint")[0][3]
        assert body["epoch"] == 1
        assert 100 < body["deadline"] <= 120
        assert {pod["metadata"]["uid"] for pod in await world.pods("digits")} == {
            pod["metadata"]["uid"] for pod in before
        }, "it is not committed yet"
        await leader.say(checkpointRequest={"id": simulation.requested[0], "generation": 1, "savedStep": STEP + 2})
        await until(partial(elsewhere, world, 1, doomed), "ranks run again elsewhere", seconds=60)
        after = await world.pods("digits")
        assert after[0]["metadata"]["uid"] == before[0]["metadata"]["uid"], "the other one stays"
        status = (await world.job("digits"))["status"]
        assert status["restarts"]["preemption"] == status["restarts"]["total"] == 1
        assert status["lastFailure"]["reason"] == "SpotInterruption"
        events = [e["message"] for e in await world.all(EVENTS) if e["reason"] == "SpotInterruption"]
        assert any(f"the checkpoint of step {STEP + 2} is committed" in message for message in events), events
        assert len(simulation.requested) == 1


async def test_a_withdrawn_notice_costs_nothing(world: World) -> None:
    async with simulate(world, saves=False) as simulation:
        before = await running(world, simulation)
        await world.taint(simulation.nodes[1], SPOT)

        async def asked() -> bool:
            return bool(simulation.requested)

        await until(asked, "the leader is asked")
        await world.taint(simulation.nodes[1])

        async def withdrawn() -> bool:
            status = (await world.job("digits"))["status"]
            return "disruption" not in status and "NoticeWithdrawn" in await reasons(world)

        await until(withdrawn, "the notice is withdrawn")
        assert [p["metadata"]["uid"] for p in await world.pods("digits")] == [p["metadata"]["uid"] for p in before]
        status = (await world.job("digits"))["status"]
        assert (status["phase"], status["generation"]) == ("Running", 1)
        assert (status.get("restarts") or {}).get("total", 0) == 0


async def test_a_lost_answer_of_the_leader_is_asked_for_again_and_the_request_stays_one(world: World) -> None:
    async with simulate(world, loses=("/v1/checkpoint",)) as simulation:
        await running(world, simulation)
        await world.taint(simulation.nodes[1], SPOT)
        await until(partial(elsewhere, world, 1, simulation.nodes[1]), "ranks run again elsewhere", seconds=60)
        assert len(set(simulation.requested)) == 1


def at_write(number: int, how: str) -> Fault:
    return lambda n, method, path: how if n == number else None


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("how", "index"),
    [
        ("die after", 0),
        ("lose", 1),
        *only_in_long_sweeps(("die after", 1), ("lose", 0), ("die", 0), ("die", 1)),
    ],
)
async def test_an_operator_that_dies_or_hears_nothing_at_any_write_of_the_way_comes_to_the_same_end(
    control_plane: ControlPlane, still_world: World, how: str, index: int
) -> None:
    """One request, one restart, free of charge; and one pod is made again, elsewhere."""
    world = still_world
    for at in range(1, MOST_WRITES):
        async with simulate(world) as simulation:
            doomed = simulation.nodes[index]
            await world.join(doomed)
            await world.taint(doomed)
            async with operator(control_plane.kubeconfig, world):
                await running(world, simulation)
            await world.taint(doomed, SPOT)
            async with operator(control_plane.kubeconfig, world, at_write(at, how)) as (_, client):
                await until(partial(elsewhere, world, index, doomed, client), "the node is left", seconds=60)
                died, writes = client.died.is_set(), client.writes
            if died:
                async with operator(control_plane.kubeconfig, world):
                    await until(partial(elsewhere, world, index, doomed), "the node is left", seconds=60)
        status = (await world.job("digits"))["status"]
        assert status["restarts"]["preemption"] == status["restarts"]["total"] == 1, (at, status["restarts"])
        assert status["lastFailure"]["reason"] == "SpotInterruption"
        assert len(set(simulation.requested)) == 1, "a request was repeated under another id"
        assert len(simulation.pods_seen) == 3, "a pod was made twice"
        await clear(world)
        if not died and writes < at:
            assert at > 5, "fewer writes than a notice, a delete, a charge and a create"
            return
    raise AssertionError(f"more than {MOST_WRITES} writes for one node")
