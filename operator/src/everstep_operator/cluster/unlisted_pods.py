"""Pods that neither lists nor the watch show: somebody has removed the label by which they are selected.

Such a pod goes on running, and its name keeps another one from being made. So before a lost pod is replaced, its name
is asked for. A pod that is found stays in the cache, where no list takes it out, and is read again with each reconcile:
nothing else would tell of its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from everstep_operator.cluster import errors
from everstep_operator.cluster.action_executor import JobRef, check_ownership
from everstep_operator.cluster.api_answer import ApiObject
from everstep_operator.cluster.cache import ClusterCache, Key
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.fair_share import FairSemaphore
from everstep_operator.cluster.resources import PODS
from everstep_operator.plan.pod_manifest import make_pod_name

T = TypeVar("T")
PARALLEL = 20


@dataclass
class UnlistedPods:
    """Reads pods by their names."""

    client: Client
    cache: ClusterCache
    requests: FairSemaphore  # of the operator: a read pod takes memory too, and a lost node has pods of many jobs

    async def refresh(self, job: Key) -> None:
        """Read again what is known of the unlisted pods of a job."""
        known = [(job[0], pod.name, pod.uid) for pod in self.cache.pods_of(job) if not pod.listed]

        async def read(namespace: str, name: str, uid: str) -> None:
            found = await self._get((namespace, name))
            if found is not None and found["metadata"]["uid"] == uid:
                self.cache.pods.put(found)
            else:
                self.cache.pods.remove((namespace, name), uid)

        await _run_limited(read(*pod) for pod in known)

    async def find(self, job: JobRef, indices: Iterable[int]) -> bool:
        """Ask for pods that the cache lacks.

        Args:
            job: The job that is to have pods of these names.
            indices: Replica indices of the pods.

        Returns:
            Whether one of them is there: the cache has it now.

        Raises:
            StaleObject: A pod of a former job has the name, or one that is going.
            NotOurs: A pod of somebody else has the name.
        """
        names = [(job.namespace, make_pod_name(job.name, index)) for index in indices]
        found = await _run_limited([self._find(job, name) for name in names])
        return any(found)

    async def _find(self, job: JobRef, name: Key) -> bool:
        found = await self._get(name)
        if found is None:
            return False
        check_ownership(PODS, job, found)
        self.cache.pods.put(found)
        if self.cache.pods.get(name) is None:
            # A list that lacks it has made it count as deleted; or it was, while the answer was on its way.
            again = await self._get(name)
            if again is None or again["metadata"]["uid"] != found["metadata"]["uid"]:
                return False
            self.cache.pods.revive(again)
        return True

    async def _get(self, name: Key) -> ApiObject | None:
        try:
            async with self.requests.slot(name[0]):
                return await self.client.get(PODS, *name)
        except errors.NotFound:
            return None


async def _run_limited(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    turn = asyncio.Semaphore(PARALLEL)

    async def one(item: Coroutine[Any, Any, T]) -> T:
        async with turn:
            return await item

    return await asyncio.gather(*map(one, work))
