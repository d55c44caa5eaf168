"""The simulated cluster with PodDisruptionBudgets, the Eviction API, and somebody who drains nodes by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.reasons import Reason
from everstep_operator.plan.actions import Action, DeleteBudget, EnsureBudget
from everstep_operator.plan.node_signals import NodeSignal
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import BudgetView, Observation
from everstep_operator.plan.plan_settings import PlanSettings
from tests.plan.world import World

CORDONED = NodeSignal(Reason.NODE_DRAINING, "cordoned")


class GuardedWorld(World):
    """A world whose operator gives jobs budgets."""

    def __init__(self, job: TrainingJob, **fields: Any) -> None:
        super().__init__(job, **fields)
        self.settings = PlanSettings(disruption_budget=True)
        self.budget: BudgetView | None = None
        self.rejected = 0  # evictions, by the budget

    def observe(self, **fields: Any) -> Observation:
        return dataclasses.replace(super().observe(**fields), budget=self.budget)

    def _act(self, action: Action) -> None:
        if isinstance(action, EnsureBudget):
            assert self.budget is None or self.budget.owner != self.job.metadata.uid, "it is there"
            if self.budget is None:
                self.budget = view_budget(action.body)
        elif isinstance(action, DeleteBudget):
            assert self.budget is not None
            assert action.uid == self.budget.uid
            assert self.budget.owner == self.job.metadata.uid, "somebody else's"
            self.budget = None
        else:
            super()._act(action)

    def _leaving(self, node: str) -> bool:
        known = self.nodes.get(node)
        return known is not None and known.signal is not None

    def evict(self, index: int) -> bool:
        """Ask the Eviction API for this pod; return whether it is told to stop, or gone."""
        pod = self.pods.get(f"{self.job.metadata.name}-{index}")
        if pod is None or pod.deleting:
            return True
        healthy = sum(1 for each in self.pods.values() if each.running and not each.deleting)
        least = self.budget.min_available if self.budget is not None else None
        if pod.running and least is not None and healthy - 1 < least:
            self.rejected += 1
            return False
        self.delete(index, disruption="EvictionByEvictionAPI")
        return True

    def cordon(self, index: int) -> str:
        return self.notice(index, CORDONED)

    def drain(self, index: int, limit: float = 600.0) -> float:
        """Cordon the node under this pod, and evict until no pod of the job is on it; return how long that took."""
        node, began = self.cordon(index), self.now
        while any(pod.node == node for pod in self.pods.values()):
            assert self.now < began + limit, f"the drain hangs: {self.status.conditions[:3]}"
            for pod in list(self.pods.values()):
                if pod.node == node:
                    self.evict(pod.index)
            self.tick()
            self.reconcile()
        return self.now - began

    def uncordon(self, node: str) -> None:
        self.nodes[node] = NodeView(node, ready=True)


def view_budget(body: Mapping[str, Any]) -> BudgetView:
    meta = body["metadata"]
    (owner,) = meta["ownerReferences"]
    return BudgetView(meta["name"], "budget-1", owner["uid"], body["spec"]["minAvailable"])
