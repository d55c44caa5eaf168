"""Leader election: only the holder of one Lease acts.

The holder's identity is the pod's UID, so a container that crashed and came back takes up its own Lease at once. A
process that cannot renew stops acting *before* others may take over: it gives up after `renew_deadline`, they wait for
`duration` since the last renewal they have **seen** (on their own clock: wall clocks of two nodes need not agree). That
clock goes on while the machine is suspended, and every write asks it: whoever wakes up late writes nothing.
Status writes carry a resourceVersion besides, so even two actors could not both write.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from everstep.agent.system.clock import read_boottime
from everstep_operator.cluster import errors
from everstep_operator.cluster.api_answer import ApiObject
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import LEASES

log = structlog.get_logger(__name__)

_MAX_INT32 = 2**31 - 1  # anybody with the right may have written it: a larger one would be rejected for good


class LeaseLost(Exception):
    """This process may no longer act."""


@dataclass
class OperatorLease:
    client: Client
    namespace: str
    name: str
    identity: str
    duration: float = 15.0
    renew_deadline: float = 10.0
    period: float = 2.0
    clock: Callable[[], float] = read_boottime
    _seen: tuple[str, str] = ("", "")  # resourceVersion and holder as last seen …
    _seen_at: float = field(default=0.0)  # … and since when on our clock
    _held: ApiObject | None = None
    _renewed_at: float = 0.0
    _answered_at: float | None = None  # when the API server last said that another one holds it

    def check(self) -> None:
        """Make sure that nobody else may act yet.

        Raises:
            LeaseLost: The lease was not renewed for so long that others may have taken it.
        """
        if (age := self.clock() - self._renewed_at) >= self.renew_deadline:
            raise LeaseLost(f"lease {self.name} was not renewed for {age:.0f} s")

    def describe_why_not_standing_by(self) -> str | None:
        """Return why this process could not take over when the holder is gone, or None: another one holds the Lease,
        and the API server has said so a moment ago."""
        if self._answered_at is None:
            return "the API server has not told yet who holds the lease"
        if (age := self.clock() - self._answered_at) > self.duration:
            return f"the API server has not answered for {age:.0f} s"
        return None

    async def acquire(self) -> None:
        """Wait until this process holds the Lease."""
        waiting = False
        while True:
            try:
                if await self._renew_or_take():
                    log.info("holding the lease", lease=self.name, identity=self.identity)
                    return
                self._answered_at = self.clock()
            except (errors.ApiError, errors.Unreachable) as error:
                log.warning("cannot reach the lease", lease=self.name, error=str(error))
            if not waiting:
                waiting = True
                log.info("waiting for the lease", lease=self.name, holder=self._seen[1])
            await asyncio.sleep(self.period)

    async def hold(self) -> None:
        """Renew the Lease for ever. Raises `LeaseLost` when others may believe that it is theirs."""
        while True:
            left = self.renew_deadline - (self.clock() - self._renewed_at)
            await asyncio.sleep(max(0.01, min(self.period, left)))
            try:
                self.check()
                async with asyncio.timeout(self.renew_deadline - (self.clock() - self._renewed_at)):
                    if not await self._renew_or_take():
                        raise LeaseLost(f"lease {self.name} was taken by {self._seen[1]}")
            except (errors.ApiError, errors.Unreachable, TimeoutError) as error:
                self.check()
                self._held = None  # read again: whether that write was stored is unknown
                log.warning("cannot renew the lease", lease=self.name, error=str(error))

    async def release(self) -> None:
        """Let the next one start at once instead of after `duration`."""
        if self._held is None:
            return
        body = {**self._held, "spec": {**self._held["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}
        self._held = None
        try:
            await self.client.replace(LEASES, self.namespace, body)
        except (errors.ApiError, errors.Unreachable) as error:
            log.info("could not release the lease; it runs out by itself", error=str(error))

    async def _renew_or_take(self) -> bool:
        """Renew or take. `_renewed_at` is the time *before* the write, so that we never believe longer than others, and
        not before the read: where the API server is slow, little would be left of it. What others have written is seen
        *after* the read: it may have been written at its end."""
        lease = self._held or await self._read()
        before = self.clock()
        if lease is None:
            body: ApiObject = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": {"name": self.name}}
            body["spec"] = self._spec(transitions=0, acquired=_micro_time())
            try:
                self._held = await self.client.create(LEASES, self.namespace, body)
            except errors.AlreadyExists:
                return False
            self._renewed_at = before
            return True
        spec = lease.get("spec", {})
        holder = spec.get("holderIdentity") or ""
        seen = (lease["metadata"]["resourceVersion"], holder)
        if seen != self._seen:
            self._seen, self._seen_at = seen, before
        if holder not in ("", self.identity) and before - self._seen_at < (spec.get("leaseDurationSeconds") or 15):
            return False
        transitions = min(_MAX_INT32, (spec.get("leaseTransitions") or 0) + (holder != self.identity))
        acquired = spec.get("acquireTime") if holder == self.identity else _micro_time()
        body = {**lease, "spec": self._spec(transitions=transitions, acquired=acquired)}
        try:
            self._held = await self.client.replace(LEASES, self.namespace, body)
        except errors.Conflict:
            self._held = None
            if holder == self.identity:  # somebody touched it: read again, and only then judge
                lease = await self._read()
                return lease is not None and (lease.get("spec", {}).get("holderIdentity") == self.identity)
            return False
        self._renewed_at = before
        return True

    async def _read(self) -> ApiObject | None:
        try:
            return await self.client.get(LEASES, self.namespace, self.name)
        except errors.NotFound:
            return None

    def _spec(self, *, transitions: int, acquired: Any) -> ApiObject:
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(self.duration),
            "acquireTime": acquired,
            "renewTime": _micro_time(),
            "leaseTransitions": transitions,
        }


def _micro_time() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
