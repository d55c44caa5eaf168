"""The nodes under jobs' pods.

A node that the cache lacks is asked for: the watch of nodes may be behind the watch of pods, and to take a node for
removed costs its pods. Only the API server's own "not found" counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import Cache
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import NODES
from everstep_operator.plan.node import NodeView
from everstep_operator.plan.observed import PodView


@dataclass
class Nodes:
    client: Client
    cache: Cache
    clock: Callable[[], float]
    _gone: dict[str, float] = field(default_factory=dict)  # since when, by our clock

    async def under(self, pods: Iterable[PodView]) -> dict[str, NodeView]:
        """By name, every node that one of these pods is bound to."""
        names = {pod.node for pod in pods if pod.node}
        unknown = [name for name in names if self._known(name) is None]
        if unknown:
            await asyncio.gather(*(self._ask(name) for name in unknown))
        return {name: view for name in names if (view := self._known(name)) is not None}

    def _known(self, name: str) -> NodeView | None:
        entry = self.cache.nodes.get(("", name))
        if entry is not None:
            self._gone.pop(name, None)  # it has come back
            return entry.value
        since = self._gone.get(name)
        return NodeView(name, gone_since=since) if since is not None else None

    async def _ask(self, name: str) -> None:
        try:
            self.cache.nodes.put(await self.client.get(NODES, None, name))
        except errors.NotFound:
            # What nobody's pods are on any more is of no interest.
            self._gone = {other: since for other, since in self._gone.items() if self.cache.jobs_on(other)}
            self._gone[name] = self.clock()
