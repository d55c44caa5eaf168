"""One operator acts at a time: the Lease, against a real API server."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from everstep.agent.system.clock import read_boottime
from everstep_operator.cluster import errors
from everstep_operator.cluster.lease import LeaseLost, OperatorLease
from everstep_operator.cluster.resources import LEASES
from tests.integration.world import OperatorProcess, World, until


def lease(world: World, identity: str, name: str, seconds: float = 6.0) -> OperatorLease:
    """On a busy machine a renewal may take a second or two."""
    return OperatorLease(
        world.client, world.namespace, name, identity, duration=seconds, renew_deadline=seconds / 2, period=0.1
    )


async def test_the_second_waits_until_the_first_is_silent(world: World) -> None:
    first, second = lease(world, "a", "x"), lease(world, "b", "x")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(8)
    assert not waiting.done(), "taken while it was being renewed"
    holding.cancel()  # the first is gone without a word
    started = asyncio.get_running_loop().time()
    await asyncio.wait_for(waiting, 60)
    assert asyncio.get_running_loop().time() - started >= 4.5
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(first.hold(), 60)


async def test_a_replica_that_stands_by_is_ready_while_the_api_server_answers_it(world: World) -> None:
    """Else `helm --wait` and a rollout of two replicas hang."""
    await lease(world, "a", "x").acquire()
    second = lease(world, "b", "x")
    second.duration = 600.0
    assert second.describe_why_not_standing_by() is not None, "it may be the one that is to lead"
    waiting = asyncio.create_task(second.acquire())

    async def stands_by() -> bool:
        return second.describe_why_not_standing_by() is None

    await until(stands_by, "it is ready", 120)
    waiting.cancel()
    second.clock = lambda: read_boottime() + 601
    assert "has not answered for" in str(second.describe_why_not_standing_by())


async def test_the_second_of_two_operators_is_ready(operator: OperatorProcess, tmp_path: Path) -> None:
    """The real process: `/readyz` is what the kubelet asks."""
    await asyncio.to_thread(operator.wait_ready)
    flags = {**operator.flags, "pod-uid": "standby-pod", "key-folder": str(operator.folder / "key")}
    standby = OperatorProcess(operator.kubeconfig, tmp_path, operator.agent_port, flags=flags)
    standby.start()
    try:
        await asyncio.to_thread(standby.wait_ready, 120)
        assert "everstep_operator_leader 0.0" in standby.fetch("/metrics", standby.metrics_port)
        assert "everstep_operator_leader 1.0" in operator.fetch("/metrics", operator.metrics_port)
    finally:
        assert standby.stop() == 0


async def test_a_restarted_container_goes_on_at_once(world: World) -> None:
    await lease(world, "pod", "x", 600).acquire()
    await asyncio.wait_for(lease(world, "pod", "x", 600).acquire(), 60)


async def test_a_released_lease_is_free_at_once(world: World) -> None:
    first = lease(world, "a", "x", 600)
    await first.acquire()
    await first.release()
    await asyncio.wait_for(lease(world, "b", "x", 600).acquire(), 60)


async def test_who_cannot_renew_gives_up_before_others_may_take_over(world: World) -> None:
    first = lease(world, "a", "x")
    await first.acquire()

    async def lost(*_: object, **__: object) -> object:
        raise errors.Unreachable("cut off", sent=True)

    first.client = type("CutOff", (), {"get": lost, "replace": lost, "create": lost})()
    started = asyncio.get_running_loop().time()
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(first.hold(), 60)
    assert asyncio.get_running_loop().time() - started < first.duration


async def test_two_that_start_together(world: World) -> None:
    name = uuid.uuid4().hex
    leases = [lease(world, f"i{n}", name) for n in range(5)]
    tasks = [asyncio.create_task(one.acquire()) for one in leases]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.5)
    assert sum(task.done() for task in tasks) == 1
    for task in tasks:
        task.cancel()
    found = await world.client.get(LEASES, world.namespace, name)
    assert found["spec"]["holderIdentity"].startswith("i")
