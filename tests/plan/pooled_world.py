"""The simulated cluster with nodes of several pools, each with room of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

from everstep_operator.api.job import TrainingJob
from tests.builders import pool
from tests.plan.world import World


class PooledWorld(World):
    """A world where pods go to nodes of the pool that their node selector names.

    Args:
        job: The job.
        room: Nodes by the name of a pool that exists; one whose name begins with "spot" is of spot capacity.
        prices: Prices per hour by the name of the pool.
    """

    def __init__(self, job: TrainingJob, room: dict[str, int], prices: dict[str, float] | None = None) -> None:
        super().__init__(job)
        self.room = room
        self.pool_of: dict[str, str] = {}  # by the pod's UID
        for name in room:
            made = pool(name).spot() if name.startswith("spot") else pool(name)
            self.pools[name] = (made.spec(pricePerHour=prices[name]) if prices else made).build()

    def _create(self, body: Any) -> None:
        before = self._uids
        super()._create(body)
        if self._uids > before:
            self.pool_of[f"pod-{self._uids}"] = body["spec"].get("nodeSelector", {}).get("pool", "")

    def bind(self) -> None:
        for name, pod in sorted(self.pods.items()):
            if not pod.live or pod.scheduled:
                continue
            where = self.pool_of[pod.uid]
            taken = {p.node for p in self.pods.values() if p.scheduled and p.ended is None}
            free = [f"{where}-{n}" for n in range(self.room[where]) if f"{where}-{n}" not in taken]
            free = [node for node in free if not self._removed(node) and node not in pod.avoids]
            if free:
                self.pods[name] = dataclasses.replace(pod, scheduled_at=self.now, node=free[0], unschedulable="")
            else:
                self.pods[name] = dataclasses.replace(pod, unschedulable="0/9 nodes are available")

    def placed(self) -> list[str]:
        """Return the pool of the node of each pod, by index; nothing where it has none."""
        found = sorted(self.pods.values(), key=lambda pod: pod.index)
        return [(pod.node or "").rpartition("-")[0] for pod in found]
