"""The lives of a job's pods, as the API server's audit log tells them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

JOB, INDEX = "everstep.dev/job", "everstep.dev/index"
FINISHED = ("Succeeded", "Failed")


@dataclass
class Life:
    """One pod object; `until` is the time of the request that removed it, `remover` who made that, and `forced` whether
    it may have left its processes running: the object was bound to a node, had not finished, and it was not its kubelet
    that removed it."""

    job: str
    index: str
    name: str
    uid: str
    since: str
    until: str | None = None
    forced: bool = False
    node: str = ""
    remover: str = ""


def lives(log: Iterable[str], namespace: str) -> list[Life]:
    """Return the life of every pod of a job in this namespace, in the order of their creation."""
    found: dict[str, Life] = {}
    for event in _about_pods(log, namespace):
        pod = event.get("responseObject") or {}
        metadata = pod.get("metadata", {})
        labels = metadata.get("labels") or {}
        uid = metadata.get("uid", "")
        if event["verb"] == "create" and JOB in labels:
            found[uid] = Life(labels[JOB], labels[INDEX], metadata["name"], uid, event["stageTimestamp"])
        elif event["verb"] == "delete" and uid in found and metadata.get("deletionGracePeriodSeconds") == 0:
            life = found[uid]
            life.until, life.remover = event["stageTimestamp"], event["user"]["username"]
            life.node = pod["spec"].get("nodeName", "")
            life.forced = (
                bool(life.node)
                and pod["status"].get("phase") not in FINISHED
                and not life.remover.startswith("system:node:")
            )
    return list(found.values())


def two_at_once(found: Iterable[Life]) -> list[str]:
    """Return the indices that had two live pods: one was made before the last was gone, or that one's removal was
    forced."""
    by_index: dict[tuple[str, str], list[Life]] = defaultdict(list)
    for life in found:
        by_index[life.job, life.index].append(life)
    wrong = []
    for (job, index), of_index in by_index.items():
        for one, other in pairwise(sorted(of_index, key=lambda life: life.since)):
            if one.until is None or one.forced or other.since < one.until:
                wrong.append(f"{job}, index {index}: {one.name} ({one.uid}) when {other.name} ({other.uid}) was made")
    return wrong


def two_by_operator(log: Iterable[str], namespace: str, operator: str, broken: Collection[str]) -> list[str]:
    """Return the indices in this namespace that had two live pods by the operator's doing.

    Args:
        log: The lines of the audit log.
        namespace: The namespace of the jobs.
        operator: The user name with which the operator asks.
        broken: The nodes that were broken on purpose, whose pods the operator may remove without their kubelets' word.
    """
    found = lives(log, namespace)
    for life in found:
        life.forced &= life.remover == operator and life.node not in broken
    return two_at_once(found)


def _about_pods(log: Iterable[str], namespace: str) -> Iterator[dict[str, Any]]:
    for line in log:
        if not line.endswith("\n"):
            return  # being written
        if namespace not in line:
            continue
        event = json.loads(line)
        target = event.get("objectRef", {})
        if target.get("resource") != "pods" or target.get("namespace") != namespace or target.get("subresource"):
            continue
        # A dry run (of pod 0, before a set is made) is answered like a real request, and makes nothing.
        if event["responseStatus"].get("code", 0) < 300 and "dryRun=" not in event["requestURI"]:
            yield event
