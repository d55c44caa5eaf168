"""The nodes under jobs' pods.

A node that the cache lacks is asked for: the watch of nodes may be behind the watch of pods, and to take a node for
removed costs its pods. Only the API server's own "not found" counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from everstep_operator.cluster import errors
from everstep_operator.cluster.admitted_pods import AdmittedPods
from everstep_operator.cluster.cache import ClusterCache, Key
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import NODES
from everstep_operator.plan.affinity import count_rule_terms
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.node_capacity import NodeCapacity, count_places
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import PodView
from everstep_operator.plan.pod_manifest import build_shared_labels

NODES_A_SECOND = 5000  # a tenth of a core, or less
BURST_SECONDS = 4.0  # which may be used up at once: in most clusters nothing is ever put off
# A count waits no more than so many times as long as it takes to make up for the others. Jobs look together and in
# one order, so by `BURST_SECONDS` alone the last ones would never be counted again.
MAX_WAIT_FACTOR = 10.0
# A count is one step of the event loop, from which the operator's Lease is renewed. All of a cluster's nodes against
# rules of thousands of terms would be one of minutes: of such a set nobody knows how many pods could be placed.
MAX_TERMS_TIMES_NODES = 1_000_000
TERMS_OF_A_NODE = 50  # cost as much as to look at one more node
# Seconds in which a node that was not found is not asked for again, though no pod is on it: pods may be kept from it.
KEEP_GONE_SECONDS = 60.0
CLOCK_STEP_SECONDS = 1.0  # of the times in a pod's conditions


class _Absence(NamedTuple):
    """A node that was not found: since when, and when it was last asked for, by our clock."""

    since: float
    asked: float


@dataclass
class NodeDirectory:
    client: Client
    cache: ClusterCache
    clock: Callable[[], float]
    timer: Callable[[], float] = time.monotonic
    examined: int = 0  # nodes, in all counts
    _paid_until: float = float("-inf")  # by `timer`: when what was counted is made up for
    _gone: dict[str, _Absence] = field(default_factory=dict)
    # By job and part: what its count was made from, the count, and when (by `timer`) it was made.
    _places: dict[tuple[Key, int], tuple[tuple[int, str, int, int, str], int | None, float]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.admitted = AdmittedPods(self.client)

    async def find_nodes_under(self, pods: Iterable[PodView], also: Iterable[str] = ()) -> dict[str, NodeView]:
        """Return every node that one of these pods is bound to, or that keeps away from it one that has no node yet, by
        name; and those that are named besides."""
        pods = list(pods)
        names = set(also).union(*(({pod.node} if pod.node else pod.avoids) for pod in pods))
        # A node of the name is there again: pods are bound to it.
        again = {pod.node for pod in pods if self._was_bound_since_asked(pod)}
        unknown = [name for name in names if name in again or self._get_known_node(name) is None]
        if unknown:
            await asyncio.gather(*(self._fetch_node(name) for name in unknown))
        return {name: view for name in names if (view := self._get_known_node(name)) is not None}

    def count_places_of_set(self, job: Key, uid: str, frozen: FrozenTemplate, wanted: int) -> int | None:
        """Count the pods of a job that all nodes in the cache could hold, as `count_places`.

        Where some are in a pool of their own, each part is counted as if it were alone: this is an upper bound.
        """
        if frozen.on_demand is None:
            return self.count_places(job, uid, frozen.epoch, frozen.pod, wanted)
        first = min(wanted, frozen.num_on_demand)
        counts = [
            self.count_places(job, uid, frozen.epoch, pod, count, part)
            for part, pod, count in ((1, frozen.on_demand, first), (2, frozen.pod, wanted - first))
        ]
        return None if None in counts else sum(count or 0 for count in counts)

    def count_places(
        self, job: Key, uid: str, template: int, pod: Mapping[str, Any], wanted: int, part: int = 0
    ) -> int | None:
        """Count the pods of a job that all nodes in the cache could hold.

        Nodes of a large cluster change all the time, and all of this is done in one event loop: where the counts of all
        jobs have examined more than `NODES_A_SECOND`, the last one is given once more.

        Args:
            job: Namespace and name of the job.
            uid: Its UID.
            template: The epoch of its template.
            pod: The frozen pod template.
            wanted: How many pods the job wants: no more are counted.
            part: Number of the part of the set, where it is in several pools: no admitted pod stands for all of it.

        Returns:
            The count; None while no node is known, or where it would take too long.
        """
        if not len(self.cache.nodes):
            return None
        admitted = self.admitted.get(job, uid, template) if part == 0 else None
        made_from = (self.cache.node_changes, uid, template, wanted, admitted.text if admitted is not None else "")
        known = self._places.get((job, part))
        if known is not None and known[0] == made_from:
            return known[1]
        if known is not None and known[0][1:] == made_from[1:] and not self._may_count_again(known[2]):
            return known[1]
        if admitted is not None:
            pod = {**pod, "spec": {**pod["spec"], **admitted.spec}}
        before = self.examined
        labels, terms = build_shared_labels(pod, job[1], template), count_rule_terms(pod.get("spec") or {})
        places = None
        if terms * len(self.cache.nodes) <= MAX_TERMS_TIMES_NODES:
            places = count_places(pod, self._list_capacities(), enough=wanted, labels=labels, namespace=job[0])
        now = self.timer()
        cost = (self.examined - before) * (1 + terms / TERMS_OF_A_NODE) / NODES_A_SECOND
        self._paid_until = max(self._paid_until, now - BURST_SECONDS) + cost
        self._places[(job, part)] = (made_from, places, now)
        return places

    def _may_count_again(self, last: float) -> bool:
        now = self.timer()
        return now - last >= MAX_WAIT_FACTOR * (self._paid_until - now)

    def _list_capacities(self) -> Iterator[NodeCapacity]:
        for _, node in self.cache.nodes.items():
            if node.capacity is not None:
                self.examined += 1
                yield node.capacity

    def forget(self, job: Key) -> None:
        """Drop what is known of a job that waits no more."""
        for part in range(3):
            self._places.pop((job, part), None)
        self.admitted.forget(job)

    def _get_known_node(self, name: str) -> NodeView | None:
        entry = self.cache.nodes.get(("", name))
        if entry is not None:
            self._gone.pop(name, None)  # it has come back
            return entry.value
        absence = self._gone.get(name)
        return NodeView(name, gone_since=absence.since) if absence is not None else None

    def _was_bound_since_asked(self, pod: PodView) -> bool:
        """Return whether a pod may have been bound to its node since that was last asked for and not found."""
        absence = self._gone.get(pod.node or "")
        at = pod.scheduled_at
        return absence is not None and at is not None and at >= absence.asked - CLOCK_STEP_SECONDS

    async def _fetch_node(self, name: str) -> None:
        try:
            self.cache.nodes.put(await self.client.get(NODES, None, name))
        except errors.NotFound:
            now = self.clock()
            # What nobody's pods are on any more is soon of no interest.
            self._gone = {
                other: absence
                for other, absence in self._gone.items()
                if self.cache.jobs_on(other) or absence.since > now - KEEP_GONE_SECONDS
            }
            known = self._gone.get(name)
            self._gone[name] = _Absence(now if known is None else known.since, now)
