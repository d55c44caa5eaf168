"""Reads the Leases that kubelets renew (in the namespace kube-node-lease, four times in their duration: every 10 s,
unless a kubelet is configured otherwise), of nodes under silent agents only: a watch of all would be 500 events a
second on 5,000 nodes.

Whether one was renewed is judged by its resourceVersion and our own clock, never by the time that is written in it:
clocks of machines need not agree. Time in which we could not read, or stood still, does not count: kubelets could not
renew either while the API server was away.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from everstep.agent.system.clock import read_boottime
from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import ClusterCache, Key
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.log_limit import LogRateLimiter
from everstep_operator.cluster.resources import LEASES
from everstep_operator.plan.node_loss import describe_brake
from everstep_operator.plan.node_view import NodeView

log = structlog.get_logger(__name__)

NODE_LEASES_NAMESPACE = "kube-node-lease"
PERIOD = 2.0  # seconds between two reads of one Lease
# Where we may not read it: a right may be given later, and an API server that has just started denies any.
UNAUTHORIZED_PERIOD = 10.0
READS_AT_ONCE = 16
READS_A_SECOND = 100
MAX_AVOIDED = 32  # names in a pod that is made
# Of the time after which a node is silent: from then on it counts where many are silent at once, since they are never
# found silent in the same moment.
UNRENEWED = 0.75
# Of the duration that a Lease tells, the least time after which a node is silent: one and a half of its kubelet's
# intervals. It is 15 s of the 40 that are usual.
LEAST_SILENCE = 1.5 / 4


@dataclass
class _FollowedNode:
    """The reads of one node's Lease so far."""

    task: asyncio.Task[None]
    jobs: set[Key] = field(default_factory=set)
    version: str = ""
    unchanged_since: float | None = None  # by `timer`
    read_at: float | None = None  # by `timer`
    silent_since: float | None = None  # by `clock`
    renewed_at: float | None = None  # by `clock`
    least_silence: float = 0.0  # seconds, by the duration of the Lease

    def is_unrenewed(self, silence: float) -> bool:
        """Tell whether the node is silent, or nearly so."""
        if self.silent_since is not None or self.unchanged_since is None or self.read_at is None:
            return self.silent_since is not None
        return self.read_at - self.unchanged_since >= UNRENEWED * max(silence, self.least_silence)


@dataclass
class _Counts:
    """Numbers of nodes, and of those that are unrenewed, by zone, and by pool for pools that have such nodes."""

    nodes: Counter[str] = field(default_factory=Counter)
    unrenewed: Counter[str] = field(default_factory=Counter)
    pool_nodes: Counter[str] = field(default_factory=Counter)
    pool_unrenewed: Counter[str] = field(default_factory=Counter)
    selectors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by pool; of those that select by labels


class NodeLeases:
    """Follows the Leases of suspect nodes. `changed(job)` is called when a node of the job becomes silent, or is heard
    again."""

    def __init__(
        self,
        client: Client,
        cache: ClusterCache,
        changed: Callable[[Key], None],
        *,
        clock: Callable[[], float],
        silence: float,
        timer: Callable[[], float] = read_boottime,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Begin with no node.

        Args:
            client: The API server.
            cache: Holds all nodes.
            changed: Called with jobs that should be looked at again.
            clock: Unix seconds, as plans have them.
            silence: Seconds without a renewal after which a node is silent; 0: never.
            timer: Monotonic seconds that go on while the machine is suspended.
            sleep: Waits for so many seconds of `timer`.
        """
        self._client = client
        self._cache = cache
        self._changed = changed
        self._clock = clock
        self._silence = silence
        self._timer = timer
        self._sleep = sleep
        self._nodes: dict[str, _FollowedNode] = {}
        self._changes = 0  # how often a node has become unrenewed, or was renewed
        self._counted: tuple[tuple[int, int, int], _Counts] | None = None  # of which changes, and the counts
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self._logs = LogRateLimiter()

    def follow(self, job: Key, nodes: frozenset[str]) -> None:
        """Follow these nodes for a job, and no others for it any more."""
        if not self._silence:
            return
        for name in nodes:
            known = self._nodes.get(name)
            if known is None or known.task.done():  # it never ends of itself: a bug, but no reason to stop
                task = asyncio.create_task(self._follow_forever(name), name=f"Lease of node {name}")
                known = self._nodes[name] = _FollowedNode(task)
                self._changes += 1
            known.jobs.add(job)
        for name in [name for name, each in self._nodes.items() if job in each.jobs and name not in nodes]:
            self._nodes[name].jobs.discard(job)
            self._drop_if_idle(name)

    def mark_silent(self, nodes: Iterable[NodeView]) -> dict[str, NodeView]:
        """Return the nodes by name, with what their Leases say of those that are silent."""
        marked = {}
        for node in nodes:
            known = self._nodes.get(node.name)
            if known is not None:
                held = self._find_brake(node) if known.silent_since is not None else ""
                unrenewed = known.is_unrenewed(self._silence)
                node = replace(
                    node,
                    silent_since=known.silent_since,
                    unrenewed=unrenewed,
                    renewed_at=known.renewed_at,
                    held=held,
                )
            marked[node.name] = node
        return marked

    def list_silent_nodes(self) -> tuple[str, ...]:
        """Return the silent nodes that are Ready for the scheduler, which hears of a dead one after some 50 s."""
        return tuple(sorted(name for name, each in self._nodes.items() if each.silent_since is not None))[:MAX_AVOIDED]

    async def close(self) -> None:
        tasks = [each.task for each in self._nodes.values()]
        self._nodes.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find_brake(self, node: NodeView) -> str:
        """Return why this node is not to be taken for dead now, or nothing."""
        counts, zone = self._count_nodes(), node.zone
        found = describe_brake(counts.unrenewed[zone], counts.nodes[zone], f"zone {zone}" if zone else "the cluster")
        for pool in _list_pools(node, counts.selectors):
            found = found or describe_brake(counts.pool_unrenewed[pool], counts.pool_nodes[pool], f"pool {pool}")
        return found or describe_brake(counts.unrenewed.total(), counts.nodes.total(), "the cluster")

    def _count_nodes(self) -> _Counts:
        """Count all nodes: once for all that is asked until one of them changes. When half of a large cluster is
        silent, each of its jobs asks for each of its nodes again and again."""
        changes = (self._cache.node_view_changes, self._cache.pool_changes, self._changes)
        if self._counted is not None and self._counted[0] == changes:
            return self._counted[1]
        pools = {name: (pool.get("spec") or {}).get("nodeSelector") for (_, name), pool in self._cache.pools.items()}
        counts = _Counts(selectors={name: selector for name, selector in pools.items() if selector})
        witnesses = []
        for (_, name), node in self._cache.nodes.items():
            known = self._nodes.get(name)
            is_silent = known is not None and known.is_unrenewed(self._silence)
            if not (node.ready or is_silent):
                continue  # it has been gone for long, and is no witness of anything
            witnesses.append(node)
            counts.nodes[node.zone] += 1
            counts.unrenewed[node.zone] += is_silent
            if is_silent:
                counts.pool_unrenewed.update(_list_pools(node, counts.selectors))
        concerned = {name: counts.selectors[name] for name in counts.pool_unrenewed}
        for node in witnesses if concerned else ():
            counts.pool_nodes.update(_list_pools(node, concerned))
        self._counted = (changes, counts)
        return counts

    @property
    def _period(self) -> float:
        """Return the seconds between two reads of one Lease: longer where very many are followed."""
        return max(PERIOD, len(self._nodes) / READS_A_SECOND)

    def _drop_if_idle(self, name: str) -> None:
        known = self._nodes[name]
        entry = self._cache.nodes.get(("", name))
        # A dead node is followed until the scheduler knows: replacements would be bound to it meanwhile.
        if not known.jobs and (known.silent_since is None or entry is None or not entry.value.ready):
            known.task.cancel()
            del self._nodes[name]
            self._changes += 1

    async def _follow_forever(self, name: str) -> None:
        while True:
            pause = self._period
            try:
                async with self._reads:
                    asked = self._timer()
                    lease = await self._client.get(LEASES, NODE_LEASES_NAMESPACE, name)
            except errors.NotAuthorized as error:
                pause = max(pause, UNAUTHORIZED_PERIOD)
                if (left_out := self._logs.left_out("unauthorized")) is not None:
                    log.warning(
                        "may not read the leases of nodes: one is lost when its Node is removed",
                        error=error.message,
                        times_before=left_out,
                    )
            except errors.NotFound:
                self._note_read(name, "", asked)  # some virtual nodes have none: nothing can be said of them
            except (errors.ApiError, errors.Unreachable) as error:
                if (left_out := self._logs.left_out(name)) is not None:
                    log.info("cannot read the lease of a node", node=name, error=str(error), times_before=left_out)
            else:
                duration = (lease.get("spec") or {}).get("leaseDurationSeconds") or 0
                version = str(lease["metadata"].get("resourceVersion") or "")
                self._note_read(name, version, asked, LEAST_SILENCE * duration)
            await self._sleep(pause)
            if name in self._nodes:
                self._drop_if_idle(name)

    def _note_read(self, name: str, version: str, asked: float, least_silence: float = 0.0) -> None:
        """Take in a Lease that was read. It was as it is at some time after `asked`."""
        known, now = self._nodes.get(name), self._timer()
        if known is None:
            return
        was_unrenewed = known.is_unrenewed(self._silence)
        gap = now - known.read_at if known.read_at is not None else 0.0
        known.read_at, known.least_silence = now, least_silence
        silence = max(self._silence, least_silence)
        if not version or version != known.version or known.unchanged_since is None:
            if version and known.version:
                known.renewed_at = self._clock()
            known.version, known.unchanged_since = version, now if version else None
            self._set_silent(name, known, None)
        elif gap > 3 * self._period:
            known.unchanged_since = now
        elif known.silent_since is None and asked - known.unchanged_since >= silence:
            log.warning("a node is silent", node=name, seconds=round(asked - known.unchanged_since, 1))
            self._set_silent(name, known, self._clock())
        self._changes += known.is_unrenewed(self._silence) != was_unrenewed

    def _set_silent(self, name: str, known: _FollowedNode, since: float | None) -> None:
        if known.silent_since == since:
            return
        if since is None:
            log.info("a silent node is heard again", node=name)
        known.silent_since = since
        for job in {*known.jobs, *self._cache.jobs_on(name)}:
            self._changed(job)


def _list_pools(node: NodeView, selectors: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the TrainingPools, of those with these selectors, to which a node belongs by its labels."""
    labels = node.capacity.labels if node.capacity is not None else {}
    return [name for name, selector in selectors.items() if all(labels.get(key) == selector[key] for key in selector)]
