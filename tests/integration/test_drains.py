"""Jobs with PodDisruptionBudgets on a real API server with its Eviction API; the disruption controller is ours."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster import errors
from everstep_operator.cluster.resources import BUDGETS, CONFIG_MAPS, JOBS, NODES, PODS, SECRETS, SERVICES
from tests.integration.inprocess import DEATHS, InjectedClient, Simulation, operator
from tests.integration.world import World, until


def simulate(world: World, **fields: Any) -> Simulation:
    names = [f"{world.namespace}-{name}" for name in ("head", "drained", "spare")]
    return Simulation(world, "digits", (names[0], names[1]), spare=names[2], step=40, **fields)


async def report_budgets(world: World) -> int:
    """Do what kubelets and the disruption controller do; return how many budgets there are."""
    for pod in await world.all(PODS):
        known = pod["status"].get("conditions") or []
        if pod["status"]["phase"] == "Running" and all(each["type"] != "Ready" for each in known):
            with contextlib.suppress(errors.NotFound):
                await world._status(pod, conditions=[*known, {"type": "Ready", "status": "True"}])
    budgets = await world.all(BUDGETS)
    for budget in budgets:
        least = budget["spec"]["minAvailable"]
        status = {"observedGeneration": budget["metadata"]["generation"], "disruptionsAllowed": 0}
        status |= {"currentHealthy": least, "desiredHealthy": least, "expectedPods": least}
        path = BUDGETS.path(world.namespace, budget["metadata"]["name"]) + "/status"
        with contextlib.suppress(errors.NotFound):  # the operator has deleted it meanwhile
            await world._patch(path, {"status": status})
    return len(budgets)


async def cordon(world: World, node: str) -> None:
    await world._patch(NODES.path(None, node), {"spec": {"unschedulable": True}})


async def evict(world: World, name: str) -> bool:
    """Ask for the eviction of a pod, as `kubectl drain` does; return whether the API server agrees."""
    about = {"name": name, "namespace": world.namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": about}
    path = PODS.path(world.namespace, name, "eviction")
    try:
        await world.client._send("create", "x", "POST", path, (), body, "application/json")
    except errors.TooManyRequests:
        return False
    except errors.NotFound:
        pass
    return True


async def is_guarded(world: World) -> bool:
    return await report_budgets(world) == 1


@pytest.mark.parametrize("saves", [True, False])
async def test_a_drain_by_evictions_waits_for_the_checkpoint_and_ends(
    control_plane: ControlPlane, still_world: World, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_operator.plan.disruption_budget.HOLD_SECONDS", 5.0)
    world = still_world
    async with (
        simulate(world, saves=saves) as simulation,
        operator(control_plane.kubeconfig, world, disruption_budget=True),
    ):
        await world.submit("digits", numNodes=2)
        await world.until_phase("digits", "Running")
        await until(partial(is_guarded, world), "the set is guarded")
        before = await world.pods("digits")
        assert not await evict(world, "digits-1"), "no node is drained"
        drained = simulation.nodes[1]
        await cordon(world, drained)
        simulation.nodes = (simulation.nodes[0], simulation.spare)  # where a scheduler would place a pod now

        async def is_empty() -> bool:
            await report_budgets(world)
            there = [p for p in await world.pods("digits") if p["spec"].get("nodeName") == drained]
            for pod in there:
                await evict(world, pod["metadata"]["name"])
            return not there

        await until(is_empty, "the drain ends", 60)
        assert simulation.requested, "ranks were asked to save before"

        async def is_running_elsewhere() -> bool:
            pods, status = await world.pods("digits"), (await world.job("digits"))["status"]
            elsewhere = len(pods) == 2 and pods[1]["spec"].get("nodeName") not in (None, drained)
            return elsewhere and status["phase"] == "Running" and await is_guarded(world)

        await until(is_running_elsewhere, "the set runs elsewhere and is guarded again", 60)
        after = await world.pods("digits")
        assert after[0]["metadata"]["uid"] == before[0]["metadata"]["uid"]


async def test_the_budget_goes_when_the_job_is_suspended_and_a_strangers_stays(
    control_plane: ControlPlane, still_world: World
) -> None:
    world = still_world
    theirs = {
        "metadata": {"name": "digits", "labels": {"app.kubernetes.io/managed-by": "everstep"}},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"everstep.dev/job": "digits"}}},
    }
    async with simulate(world), operator(control_plane.kubeconfig, world, disruption_budget=True):
        await world.submit("digits", numNodes=2)
        await world.until_phase("digits", "Running")
        await until(partial(is_guarded, world), "the set is guarded")
        await world.change("digits", suspend=True)
        await world.until_phase("digits", "Suspended")

        async def are_gone() -> bool:
            return await world.all(BUDGETS) == []

        await until(are_gone, "no budget is left")
        made = await world.client.create(BUDGETS, world.namespace, theirs)
        await world.change("digits", suspend=False)
        await world.until_phase("digits", "Running")
        await world.change("digits", suspend=True)
        await world.until_phase("digits", "Suspended")
        assert [b["metadata"]["uid"] for b in await world.all(BUDGETS)] == [made["metadata"]["uid"]]


async def clear(world: World) -> None:
    for resource in (JOBS, PODS, SERVICES, SECRETS, CONFIG_MAPS, BUDGETS):
        for item in await world.all(resource):
            meta = item["metadata"]
            await world.client.delete(resource, world.namespace, meta["name"], uid=meta["uid"], grace=0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [*DEATHS, "lose"])
async def test_a_drain_ends_whichever_write_an_operator_dies_at_or_hears_nothing_of(
    control_plane: ControlPlane, still_world: World, how: str
) -> None:
    world = still_world

    async def is_left(node: str, client: InjectedClient | None = None) -> bool:
        await report_budgets(world)
        there = [pod for pod in await world.pods("digits") if pod["spec"].get("nodeName") == node]
        for pod in there:
            await evict(world, pod["metadata"]["name"])
        return (client is not None and client.died.is_set()) or (not there and await is_guarded(world))

    for at in range(1, 30):
        async with simulate(world) as simulation:
            drained = simulation.nodes[1]
            await world.join(drained)
            await world._patch(NODES.path(None, drained), {"spec": {"unschedulable": None}})
            async with operator(control_plane.kubeconfig, world, disruption_budget=True):
                await world.submit("digits", numNodes=2)
                await world.until_phase("digits", "Running")
                await until(partial(is_guarded, world), "the set is guarded")
            await cordon(world, drained)
            simulation.nodes = (simulation.nodes[0], simulation.spare)
            fault = partial(lambda at, n, *_: how if n == at else None, at)
            async with operator(control_plane.kubeconfig, world, fault, disruption_budget=True) as (_, client):
                await until(partial(is_left, drained, client), "the drain ends", 60)
                died, writes = client.died.is_set(), client.writes
            if died:
                async with operator(control_plane.kubeconfig, world, disruption_budget=True):
                    await until(partial(is_left, drained), "the drain ends with the next operator", 60)
        await clear(world)
        if not died and writes < at:
            assert at > 5, "fewer writes than a record, a deletion, a charge, a pod and a budget"
            return
    raise AssertionError("more than 30 writes for one drain")
