"""Lists everything now and then, and repairs what the watch has missed: deletions, and changes it never told.

A watch that was cut off re-lists, but says nothing of what vanished meanwhile. And one that has gone deaf says nothing
at all: if a list shows what the watch should have told long ago, the watch is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from everstep_operator import metrics
from everstep_operator.cluster import agent_code, errors
from everstep_operator.cluster.agent_code import ALL, AgentCode
from everstep_operator.cluster.api_answer import ApiObject
from everstep_operator.cluster.cache import ClusterCache, ObjectCache
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.comparison import compare_with_list
from everstep_operator.cluster.disruption_budgets import DisruptionBudgets
from everstep_operator.cluster.frozen_templates import FrozenTemplates
from everstep_operator.cluster.log_limit import LogRateLimiter
from everstep_operator.cluster.resources import CONFIG_MAPS, JOBS, NODES, PODS, POOLS, ApiResource
from everstep_operator.plan.agent_volume import find_agent_config_map

log = structlog.get_logger(__name__)

FINISHED_PHASES = ("Succeeded", "Failed")
_KEPT = ("namespace", "name", "uid")  # of the metadata of agents' ConfigMaps
EVENT_DELAY_SECONDS = 1.0  # seconds that an event may take: the watch gathers what comes within a tenth of a second


@dataclass
class Resync:
    client: Client
    cache: ClusterCache
    frozen: FrozenTemplates
    agent: AgentCode
    budgets: DisruptionBudgets
    namespaces: tuple[str, ...]
    period: float
    deaf: Callable[[set[ApiResource]], None]  # the watches of these kinds have to be started again
    wake: Callable[[tuple[str, str]], None]
    readable: Callable[[set[str]], None] = lambda namespaces: None  # these could not be read, and can be again
    tried_at: float = field(default_factory=time.monotonic)
    done_at: float | None = None
    forbidden: set[str] = field(default_factory=set)  # watched namespaces that the last turn could not read
    listed: dict[tuple[ApiResource, str | None], int] = field(default_factory=dict)  # versions of the newest lists
    _events: Counter[ApiResource] = field(default_factory=Counter)
    _soon: asyncio.Event = field(default_factory=asyncio.Event)
    _logs: LogRateLimiter = field(default_factory=LogRateLimiter)

    def note_event(self, resource: ApiResource) -> None:
        """Note that the watch told something of this kind. Each kind has a stream of its own, and one goes deaf
        alone."""
        self._events[resource] += 1

    def request_soon(self) -> None:
        """Do not wait for the next turn: events may have been missed."""
        self._soon.set()

    async def run(self) -> None:
        while True:
            pause = self.period * (0.9 + random.random() / 5)  # noqa: S311
            wished = False
            try:
                async with asyncio.timeout(pause):
                    wished = await self._soon.wait()
                await asyncio.sleep(min(1.0, self.period / 10))  # one list for a volley of wishes
            except TimeoutError:
                pass
            self._soon.clear()
            try:
                await self.run_once(wished=wished)
            except (errors.ApiError, errors.Unreachable) as error:
                if (left_out := self._logs.left_out(type(error).__name__)) is not None:
                    log.warning("resync failed", error=str(error), times_before=left_out)
                self._soon.set()
                await asyncio.sleep(min(5.0, self.period))

    async def run_once(self, *, wished: bool = False) -> None:
        """Compare everything once; `done_at` tells when the last comparison ended. `wished`: the watch has missed
        something, as far as is known, and is not deaf for that."""
        self.tried_at = time.monotonic()
        before, first = self._events.copy(), self.done_at is None
        repaired: Counter[ApiResource] = Counter()
        forbidden: set[str] = set()
        for resource, store in (
            (POOLS, self.cache.pools),
            (PODS, self.cache.pods),  # before the jobs: a job seen without its pods would be restarted
            (JOBS, self.cache.jobs),
            (NODES, self.cache.nodes),
        ):
            repaired[resource] += await self._compare_all(resource, store, forbidden)
        if forbidden - self.forbidden:
            log.warning("cannot read watched namespaces; going on with the others", namespaces=sorted(forbidden))
        if back := self.forbidden - forbidden:
            self.readable(back)
        self.forbidden = forbidden
        await self.budgets.refresh([place for place in self.namespaces or (None,) if place not in forbidden])
        if not (first or wished):
            await self._restart_silent_streams(repaired, before)
        active = {uid for key in self.cache.jobs if (uid := self._active_uid(key)) is not None}
        self.frozen.keep_only(active)
        await self._collect_agents()
        self.done_at = time.monotonic()
        _trim_heap()
        for key in list(self.cache.jobs):
            if self._active_uid(key) is not None:
                self.wake(key)

    async def _restart_silent_streams(self, repaired: Counter[ApiResource], before: Counter[ApiResource]) -> None:
        """Restart the watch if a stream has missed something and is silent still: a list may be faster than an
        event."""

        def silent() -> set[ApiResource]:
            return {r for r, count in repaired.items() if count and self._events[r] == before[r]}

        if silent():
            await asyncio.sleep(EVENT_DELAY_SECONDS)
        if streams := silent():
            log.warning("the watch had missed changes", streams=sorted(each.plural for each in streams))
            self.deaf(streams)

    def _active_uid(self, key: tuple[str, str]) -> str | None:
        """Return the UID of a job that is not finished, or None."""
        entry = self.cache.jobs.get(key)
        if entry is None or (entry.value.get("status") or {}).get("phase") in FINISHED_PHASES:
            return None
        return entry.uid

    async def _compare_all(self, resource: ApiResource, store: ObjectCache[Any], forbidden: set[str]) -> int:
        """Compare one kind in all namespaces. A watched namespace that was deleted took its Role with it: it joins
        `forbidden`."""
        repaired = 0
        places: tuple[str | None, ...] = (self.namespaces or (None,)) if resource.namespaced else (None,)
        for place in places:
            if place in forbidden:
                continue
            try:
                found = await compare_with_list(self.client, resource, place, store)
            except errors.NotAuthorized:
                if place is None or len(forbidden) + 1 == len(self.namespaces):
                    raise
                forbidden.add(place)
                continue
            self.listed[(resource, place)] = found.version
            if self.done_at is not None:  # the first list repairs nothing, it is the beginning
                metrics.resync_repairs.labels(resource.plural, "ghost").inc(found.deleted)
                metrics.resync_repairs.labels(resource.plural, "missed").inc(found.missed)
            repaired += found.deleted + found.missed
        return repaired

    async def _collect_agents(self) -> None:
        found: list[ApiObject] = []
        for place in self.namespaces or (None,):
            if place in self.forbidden:
                continue
            # There is one of 400 KiB in each namespace, and anybody may set our label on more.
            async for page in self.client.list(CONFIG_MAPS, place, labels=agent_code.AGENT_LABEL, metadata_only=True):
                found += ({"metadata": {k: item["metadata"].get(k) for k in _KEPT}} for item in page.items)
        used = self._agents_in_use()
        await self.agent.collect_garbage(self.client, found, used, time.monotonic())
        await self.agent.restore_missing(self.client, used)

    def _agents_in_use(self) -> dict[str, set[str]]:
        """Return the names in use by namespace, of every job that is not finished. A job whose template is unknown
        keeps all of them."""
        used: dict[str, set[str]] = {}
        for key in self.cache.jobs:
            uid = self._active_uid(key)
            if uid is None:
                continue
            frozen = self.frozen.known(uid)
            names = used.setdefault(key[0], set())
            if frozen is None:
                names.add(ALL)
                continue
            names.add(find_agent_config_map(frozen.pod.get("spec") or {}))
        return used


def _trim_heap() -> None:
    """Give the pages of the list back to the system: glibc keeps what 5,000 parsed pods once needed for ever."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
