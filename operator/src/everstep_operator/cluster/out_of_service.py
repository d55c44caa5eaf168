"""Sets and removes the operator's out-of-service taint, where an administrator allows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.api_answer import ApiObject
from everstep_operator.cluster.cache import ClusterCache
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import NODES
from everstep_operator.plan.out_of_service import (
    TAINT_KEY,
    TAINT_VALUE,
    find_own_taint,
    has_returned,
    is_own_taint,
    list_taints,
)

log = structlog.get_logger(__name__)

LOOK_SECONDS = 15.0
TRIES = 3  # of a write that somebody else's was faster than


class OutOfServiceTaints:
    """The taints of dead nodes. A rejection is logged: volumes are then detached later, and nothing else is worse."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def mark(self, name: str) -> None:
        """Taint a node, unless it is gone or tainted already."""
        await self._change(name, self._add_taint, "a dead node is marked out of service")

    async def clear(self, name: str) -> None:
        """Remove the operator's own taint from a node whose kubelet has reported since."""
        await self._change(name, self._remove_taint, "a node that is back is no longer out of service")

    async def run(self, cache: ClusterCache) -> None:
        """Clear the nodes that are back, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for name in [key[1] for key, node in cache.nodes.items() if node.returned]:
                try:
                    await self.clear(name)
                except (errors.ApiError, errors.Unreachable) as error:
                    log.warning("cannot remove a taint", node=name, error=str(error))

    async def _change(self, name: str, change: Callable[[ApiObject], list[Any] | None], said: str) -> None:
        for _ in range(TRIES):
            try:
                raw = await self._client.get(NODES, None, name)
                taints = change(raw)
                if taints is None:
                    return
                meta = {"name": name, "resourceVersion": raw["metadata"]["resourceVersion"]}
                await self._client.merge(NODES, None, {"metadata": meta, "spec": {"taints": taints}})
                log.info(said, node=name)
                return
            except errors.NotFound:
                return
            except errors.Conflict:
                continue
            except (errors.NotAuthorized, errors.Forbidden, errors.Invalid, errors.WebhookUnavailable) as error:
                log.warning("a taint was rejected", node=name, error=str(error))
                return

    def _add_taint(self, raw: ApiObject) -> list[Any] | None:
        taints = list_taints(raw)
        if any(taint.get("key") == TAINT_KEY for taint in taints):
            return None
        at = datetime.fromtimestamp(self._client.clock.now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return [*taints, {"key": TAINT_KEY, "value": TAINT_VALUE, "effect": "NoExecute", "timeAdded": at}]

    def _remove_taint(self, raw: ApiObject) -> list[Any] | None:
        if find_own_taint(raw) is None or not has_returned(raw):
            return None
        return [taint for taint in list_taints(raw) if not is_own_taint(taint)]
