"""Pods of waiting jobs as admission has made them: with limits and requests that come from a LimitRange alone, the
overhead of a RuntimeClass, tolerations for the resources of a pod, containers that a webhook adds.

A template tells nothing of them, and a set that is counted without them seems to fit on nodes that cannot hold it, or
the reverse. So one pod of each waiting set is known: from the answer to its creation, or it is read, once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import Key
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import PODS
from everstep_operator.plan.observation import PodView

log = structlog.get_logger(__name__)

# Affinity is the template's: a pod may exclude nodes that were silent when it was made.
_FIELDS = ("nodeSelector", "tolerations", "overhead", "resources")
_CONTAINERS = ("containers", "initContainers")
_OF_A_CONTAINER = ("resources", "restartPolicy")


@dataclass(frozen=True, slots=True)
class AdmittedPod:
    """The part of a pod's spec that decides on which nodes there is room for it."""

    uid: str  # of the pod
    job: str  # UID
    template: int
    spec: Mapping[str, Any]
    text: str  # the same, to be compared


@dataclass
class AdmittedPods:
    """One admitted pod of each waiting job."""

    client: Client
    _known: dict[Key, AdmittedPod] = field(default_factory=dict)

    async def learn(self, key: Key, job: str, template: int, pods: Iterable[PodView]) -> None:
        """Read a pod of the job's set, unless one of those that are there was read.

        Args:
            key: Namespace and name of the job.
            job: UID of the job.
            template: The epoch of its template.
            pods: All of its pods, as far as they are known.
        """
        mine = [pod for pod in pods if pod.live and pod.owner == job and pod.template == template]
        known = self._known.get(key)
        if not mine or (known is not None and known.uid in {pod.uid for pod in mine}):
            return
        try:
            raw = await self.client.get(PODS, key[0], mine[0].name)
        except (errors.ApiError, errors.Unreachable) as error:
            log.info("cannot read an admitted pod", pod=f"{key[0]}/{mine[0].name}", error=str(error))
            return
        if raw["metadata"].get("uid") == mine[0].uid:
            self.note(key, job, template, raw)

    def note(self, key: Key, job: str, template: int, raw: Mapping[str, Any]) -> None:
        """Keep a pod of the job's set.

        Args:
            key: Namespace and name of the job.
            job: UID of the job.
            template: The epoch of its template.
            raw: The pod, as the API server gives it.
        """
        spec, uid = _pick_spec(raw.get("spec") or {}), str(raw["metadata"].get("uid") or "")
        self._known[key] = AdmittedPod(uid, job, template, spec, json.dumps(spec, sort_keys=True))

    def get(self, key: Key, job: str, template: int) -> AdmittedPod | None:
        """Return what was read of this set, or None. Pods that it has given back since tell as much."""
        known = self._known.get(key)
        return known if known is not None and (known.job, known.template) == (job, template) else None

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that waits no more."""
        self._known.pop(key, None)


def _pick_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    picked = {name: spec[name] for name in _FIELDS if spec.get(name)}
    for kind in _CONTAINERS:
        containers = spec.get(kind) or ()
        picked[kind] = [{name: each[name] for name in _OF_A_CONTAINER if each.get(name)} for each in containers]
    return picked
