"""The operator's Lease on a machine that is suspended: no clock of the event loop has gone on when it wakes."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from everstep.agent.system.clock import read_boottime
from everstep_operator.cluster.lease import LeaseLost, OperatorLease


class Server:
    """Stores one Lease."""

    def __init__(self) -> None:
        self.version = 0
        self.lease: Any = None

    async def get(self, resource: Any, namespace: str, name: str) -> Any:
        return self.lease

    async def create(self, resource: Any, namespace: str, body: Any) -> Any:
        return await self.replace(resource, namespace, body)

    async def replace(self, resource: Any, namespace: str, body: Any) -> Any:
        self.version += 1
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        return self.lease


async def test_who_was_suspended_for_longer_than_the_lease_writes_nothing_and_gives_up() -> None:
    asleep = 0.0
    server: Any = Server()
    lease = OperatorLease(server, "ns", "x", "a", clock=lambda: time.monotonic() + asleep)
    await lease.acquire()
    lease.check()
    asleep = lease.renew_deadline  # and no time has passed for timers
    with pytest.raises(LeaseLost):
        lease.check()
    written = server.version
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(lease.hold(), 60)
    assert server.version == written


async def test_a_server_that_is_slow_to_read_takes_nothing_from_a_lease() -> None:
    """A process that has just started would give up again at once, as often as it starts."""
    now, server = 0.0, Server()
    lease = OperatorLease(cast(Any, server), "ns", "x", "a", clock=lambda: now)

    async def get(resource: Any, namespace: str, name: str) -> Any:
        nonlocal now
        now += lease.renew_deadline
        return server.lease

    server.get = get  # type: ignore[method-assign]
    await lease.acquire()
    lease.check()


async def test_a_renewal_is_seen_when_its_read_has_ended_and_not_when_it_began() -> None:
    """It may have been written at the end of a slow read: whoever wrote it believes in it for so much longer."""
    now, server = 0.0, Server()
    holder = OperatorLease(cast(Any, server), "ns", "x", "a", clock=lambda: now)
    other = OperatorLease(cast(Any, server), "ns", "x", "b", clock=lambda: now)
    await holder.acquire()

    async def get(resource: Any, namespace: str, name: str) -> Any:
        nonlocal now
        now += 8
        await holder._renew_or_take()
        return server.lease

    quick, server.get = server.get, get  # type: ignore[method-assign]
    assert not await other._renew_or_take()
    server.get = quick  # type: ignore[method-assign]
    now += holder.renew_deadline - 1
    holder.check()
    assert not await other._renew_or_take()
    now += other.duration - holder.renew_deadline + 1
    assert await other._renew_or_take()


def test_leases_are_on_the_clock_that_goes_on() -> None:
    assert OperatorLease.__dataclass_fields__["clock"].default is read_boottime
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= read_boottime() <= time.clock_gettime(time.CLOCK_BOOTTIME)


async def test_a_lease_whose_count_of_transitions_is_full_can_be_taken() -> None:
    """Somebody has written it by hand; one more would not fit into the field."""
    server: Any = Server()
    spec = {"holderIdentity": "", "leaseTransitions": 2**31 - 1}
    server.lease = {"metadata": {"name": "x", "resourceVersion": "1"}, "spec": spec}
    await OperatorLease(server, "ns", "x", "a").acquire()
    assert (server.lease["spec"]["holderIdentity"], server.lease["spec"]["leaseTransitions"]) == ("a", 2**31 - 1)
