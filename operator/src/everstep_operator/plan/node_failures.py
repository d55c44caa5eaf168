"""Nodes on which jobs have failed for reasons of the infrastructure, and which of them new pods avoid.

One loss may have any cause; two within the window are a habit of the node. What binds the jobs of others needs more
than the word of one namespace, whose users can end their own pods and speak for their own agents: another namespace's
failure, or what the Node object itself says. And however bad the news, most nodes of a cluster stay in use: what fails
everywhere is no fault of a node.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

RECORD_NAME = "everstep-node-failures"  # of the ConfigMap, in the operator's namespace
FAILURES_TO_AVOID = 2
MAX_SHARE = 4  # at most one of so many nodes is avoided, and one in any case


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """One failure of one job on one node."""

    id: str  # of what has failed: however often it is seen, it is recorded once
    namespace: str
    job: str
    reason: str
    time: float  # of day
    hardware: bool = False  # a device has a problem: once is enough
    witnessed: bool = False  # by the Node object, which no user of the namespace can change


Failures = dict[str, tuple[NodeFailure, ...]]  # by node, the newest last


def list_avoided_nodes(
    failures: Mapping[str, Collection[NodeFailure]], namespace: str | None, *, since: float, nodes: int
) -> tuple[str, ...]:
    """Return the nodes that new pods avoid, those with the newest failures first.

    Args:
        failures: Those on record, by node.
        namespace: Namespace of the pods; None: nodes that pods of any namespace avoid.
        since: Failures before this time count no more.
        nodes: The number of nodes of the cluster.
    """
    bad: list[tuple[float, str]] = []
    for name, each in failures.items():
        fresh = [failure for failure in each if failure.time > since]
        spaces = {failure.namespace for failure in fresh} if namespace is None else {namespace}
        if any(_is_avoided(fresh, space) for space in spaces):
            bad.append((max(failure.time for failure in fresh), name))
    most = max(1, nodes // MAX_SHARE)
    return tuple(name for _, name in sorted(bad, key=lambda found: (-found[0], found[1]))[:most])


def parse_record(data: Mapping[str, Any], *, since: float) -> Failures:
    """Return the failures of a ConfigMap's data. What is no failure, or too old, is left out.

    Args:
        data: By node, a JSON list.
        since: Failures before this time count no more.
    """
    found: Failures = {}
    for node, text in data.items():
        each = tuple(failure for failure in _parse_failures(text) if failure.time > since)
        if each:
            found[node] = each
    return found


def _parse_failures(text: Any) -> list[NodeFailure]:
    try:
        return [
            NodeFailure(
                id=str(each["id"]),
                namespace=str(each["namespace"]),
                job=str(each["job"]),
                reason=str(each["reason"]),
                time=float(each["time"]),
                hardware=each.get("hardware") is True,
                witnessed=each.get("witnessed") is True,
            )
            for each in json.loads(text)
        ]
    except (TypeError, ValueError, KeyError, AttributeError):
        return []


def _is_avoided(failures: Iterable[NodeFailure], namespace: str) -> bool:
    own = [failure for failure in failures if failure.namespace == namespace]
    if len(own) >= FAILURES_TO_AVOID or any(failure.hardware for failure in own):
        return True
    return len({failure.namespace for failure in failures}) >= FAILURES_TO_AVOID or any(
        failure.witnessed for failure in failures
    )
