"""The record of failures by node: one ConfigMap in the operator's namespace, which no user of a job can write.

It survives the operator. Only the operator adds to it; whoever runs the cluster may remove a node from it (`everstep
nodes --clear`), which is noticed within seconds. That the record cannot be read or written costs no job anything: nodes
are then avoided by what this process remembers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import structlog

from everstep_operator import metrics
from everstep_operator.api.reasons import Reason
from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.log_limit import LogRateLimiter
from everstep_operator.cluster.resources import CONFIG_MAPS
from everstep_operator.plan.actions import JobEvent
from everstep_operator.plan.node_failures import RECORD_NAME, Failures, NodeFailure, list_avoided_nodes, parse_record

log = structlog.get_logger(__name__)

MAX_PER_NODE, MAX_NODES = 8, 300  # at most 350 bytes each: a ConfigMap has 1 MiB
READ_AGAIN_SECONDS = 15.0
TRY_AGAIN_SECONDS = 5.0
WRITE_TRIES = 3
MAX_SEEN = 20_000


class NodeFailures:
    """The failures on record. `window`: seconds for which one counts; 0: nothing is recorded, no node avoided."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        *,
        window: float,
        clock: Callable[[], float],
        count_nodes: Callable[[], int],
        has_node: Callable[[str], bool],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._window = window
        self._clock = clock
        self._count_nodes = count_nodes
        self._has_node = has_node  # pods may name any, whoever makes them
        self._timer = timer
        self._failures: Failures = {}
        self._unsaved: list[tuple[str, NodeFailure]] = []
        self._seen: dict[str, float] = {}  # when a failure was recorded, by its id: it may have been cleared since
        self._read_at: float | None = None
        self._try_at = 0.0  # when to ask the server again that has not answered
        self._turn = asyncio.Lock()
        self._logs = LogRateLimiter()

    async def list_avoided(self, namespace: str) -> tuple[str, ...]:
        """Return the nodes that new pods of a namespace avoid."""
        if not self._window:
            return ()
        if self._is_old():
            async with self._turn:
                if self._is_old():  # nobody else has read it meanwhile
                    await self._synchronize()
        return self._list_avoided(namespace)

    def _is_old(self) -> bool:
        now = self._timer()
        if self._read_at is None:
            return True  # what others have left
        if now < self._try_at:
            return False
        # Without any on record nothing changes but by this process.
        return bool(self._unsaved) or (bool(self._failures) and now > self._read_at + READ_AGAIN_SECONDS)

    async def record(self, found: Mapping[str, NodeFailure]) -> list[JobEvent]:
        """Put failures on record, and return what their job is to be told of nodes that are avoided from now on.

        Args:
            found: Failures by node, of one job. Those that are known already change nothing.
        """
        new = {node: each for node, each in found.items() if self._window and self._is_new(node, each)}
        if not new:
            return []
        namespace = next(iter(new.values())).namespace
        before = self._list_avoided(namespace)
        self._unsaved += new.items()
        for node, each in new.items():
            metrics.node_failures.labels(each.reason).inc()
            log.info("a job has failed on a node", node=node, job=f"{each.namespace}/{each.job}", reason=each.reason)
        async with self._turn:
            await self._synchronize()
        return [self._make_event(node) for node in self._list_avoided(namespace) if node not in before]

    def _is_new(self, node: str, failure: NodeFailure) -> bool:
        now = self._clock()
        if any(failure.id == known.id for known in self._failures.get(node, ())) or not self._has_node(node):
            return False
        if self._seen.get(failure.id, float("-inf")) > now - self._window:
            return False
        self._seen.pop(failure.id, None)
        self._seen[failure.id] = now
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return True

    def list_avoided_by_all(self) -> tuple[str, ...]:
        """Return the nodes that pods of any namespace avoid, for the gauge."""
        return self._list_avoided(None)

    def _list_avoided(self, namespace: str | None) -> tuple[str, ...]:
        since = self._clock() - self._window
        return list_avoided_nodes(self._failures, namespace, since=since, nodes=self._count_nodes())

    def _make_event(self, node: str) -> JobEvent:
        last = self._failures[node][-1]
        message = (
            f"{Reason.NODE_AVOIDED.meaning} It is node {node}, where {last.job} has failed last ({last.reason}); "
            f"this ends {self._window:.0f} s after its last failure, or by `everstep nodes --clear {node}`"
        )
        return JobEvent("Warning", Reason.NODE_AVOIDED.value, message)

    async def _synchronize(self) -> None:
        """Read the record, and add what it lacks. What cannot be added stays to be added later."""
        self._try_at = self._timer() + TRY_AGAIN_SECONDS
        try:
            for _ in range(WRITE_TRIES):
                if await self._try_to_synchronize():
                    self._read_at, self._try_at = self._timer(), 0.0
                    return
        except (errors.ApiError, errors.Unreachable) as error:
            if (left_out := self._logs.left_out("record")) is not None:
                log.warning("cannot keep the record of nodes", error=str(error), times_before=left_out)
        self._failures, self._read_at = _add_failures(self._failures, self._unsaved), self._timer()

    async def _try_to_synchronize(self) -> bool:
        try:
            stored = await self._client.get(CONFIG_MAPS, self._namespace, RECORD_NAME)
        except errors.NotFound:
            stored = None
        known = parse_record((stored or {}).get("data") or {}, since=self._clock() - self._window)
        added = tuple(self._unsaved)  # others come while the server answers
        merged = _add_failures(known, added)
        if added:
            data = {node: json.dumps([asdict(each) for each in failures]) for node, failures in merged.items()}
            try:
                if stored is None:
                    await self._client.create(CONFIG_MAPS, self._namespace, {**_BODY, "data": data})
                else:
                    await self._client.replace(CONFIG_MAPS, self._namespace, {**stored, **_KIND, "data": data})
            except (errors.Conflict, errors.AlreadyExists):
                return False
        del self._unsaved[: len(added)]
        self._failures = _add_failures(merged, self._unsaved)
        return True


_KIND = {"apiVersion": "v1", "kind": "ConfigMap"}
_BODY: dict[str, Any] = {
    **_KIND,
    "metadata": {"name": RECORD_NAME, "labels": {"app.kubernetes.io/managed-by": "everstep"}},
}


def _add_failures(known: Failures, new: Iterable[tuple[str, NodeFailure]]) -> Failures:
    merged = dict(known)
    for node, failure in new:
        before = tuple(each for each in merged.get(node, ()) if each.id != failure.id)
        merged[node] = _limit_failures((*before, failure))
    newest = sorted(merged, key=lambda node: merged[node][-1].time, reverse=True)[:MAX_NODES]
    return {node: merged[node] for node in newest}


def _limit_failures(failures: tuple[NodeFailure, ...]) -> tuple[NodeFailure, ...]:
    """Return failures without the oldest of the namespace that has most of them, if they are too many: one namespace is
    not to displace what others have to say. What the Node object has told stays longest."""
    if len(failures) <= MAX_PER_NODE:
        return failures
    spaces = [failure.namespace for failure in failures]
    dropped = min(failures, key=lambda each: (each.witnessed, each.hardware, -spaces.count(each.namespace), each.time))
    return tuple(failure for failure in failures if failure is not dropped)
