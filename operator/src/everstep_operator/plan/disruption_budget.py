"""Decides about the guard of a set that runs: a PodDisruptionBudget, which makes the Eviction API reject evictions.

One pod that is evicted stops all ranks. So the budget asks for all pods while they hold their nodes, and goes before it
would hold up something that has to happen: when the job stops or ends, and when a node under a pod is cordoned or
announced to go. Ranks then save first, as `node_notices` has them do; once that checkpoint is committed, or
`HOLD_SECONDS` have passed, evictions go through. The operator's own deletions never ask a budget.

`minAvailable` is a number, since the disruption controller knows no scale of a TrainingJob
(https://kubernetes.io/docs/tasks/run-application/configure-pdb/#arbitrary-controllers-and-selectors).
"""

from __future__ import annotations

from typing import Any

from everstep_operator.api.status import Phase
from everstep_operator.plan import node_notices
from everstep_operator.plan.actions import DeleteBudget, EnsureBudget
from everstep_operator.plan.decision import Decision
from everstep_operator.plan.labels import LABEL_JOB
from everstep_operator.plan.observation import BudgetView
from everstep_operator.plan.plan_context import PlanContext
from everstep_operator.plan.pod_manifest import MANAGED_BY_LABEL, build_owner_reference

# For so long evictions from a node that is cordoned wait for a checkpoint. Managed node groups give up a drain after
# a quarter of an hour, and ask every few seconds before.
HOLD_SECONDS = 300.0
AGAIN_SECONDS = 1.0
_GUARDED_PHASES = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESTARTING})  # all pods have had their nodes


def guard_pods(s: PlanContext, decision: Decision) -> Decision:
    """Return the decision with what is to be done about the budget, if the operator is to make any."""
    if not s.observed.settings.disruption_budget:
        return decision
    guarded = decision.phase in _GUARDED_PHASES and decision.template is None
    if guarded:
        let_go, later = _judge_evictions(s, decision)
        decision, guarded = decision.requeue_at(later), not let_go
    there = _find_own(s)
    if not guarded:
        return decision.with_actions(*lift_budget(s))
    if there is None:
        return decision.with_actions(EnsureBudget(build_budget(s)))
    if there.min_available != s.wanted:  # made for another number of nodes, or edited: it is made again
        return decision.with_actions(*lift_budget(s)).requeue_at(s.now + AGAIN_SECONDS)
    return decision


def lift_budget(s: PlanContext) -> list[DeleteBudget]:
    """Return the deletion of the job's budget, if there is one."""
    there = _find_own(s)
    return [DeleteBudget(there.name, there.uid)] if there is not None else []


def build_budget(s: PlanContext) -> dict[str, Any]:
    """Return the PodDisruptionBudget that keeps all pods of the job."""
    meta = s.job.metadata
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": meta.name,
            "namespace": meta.namespace,
            "labels": {**MANAGED_BY_LABEL, LABEL_JOB: meta.name},
            "ownerReferences": [build_owner_reference(meta.name, meta.uid)],
        },
        "spec": {
            "minAvailable": s.wanted,
            "selector": {"matchLabels": {LABEL_JOB: meta.name}},
            # A pod that is not ready has nothing that is worth keeping, and its node may have to be emptied.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _find_own(s: PlanContext) -> BudgetView | None:
    """Return the job's own budget; one of another owner is never touched."""
    budget = s.observed.budget
    return budget if budget is not None and budget.owner == s.job.metadata.uid else None


def _judge_evictions(s: PlanContext, decision: Decision) -> tuple[bool, float | None]:
    """Return whether evictions are to go through now, and when to ask again.

    A drain cordons its node before it evicts, so a node that announces nothing is not drained.
    """
    under = {pod.node for pod in s.live}
    near = [
        node.signal
        for node in s.observed.nodes.values()
        if node.name in under and node.signal is not None and not node_notices.is_far(node.signal, s.now)
    ]
    record = decision.disruption
    if not near:
        return False, None
    if record is None or record.saved_step is not None or record.leaving is not None:
        return True, None  # without a record, nothing that would be saved is waited for: plain ranks
    until = record.noticed.timestamp() + HOLD_SECONDS
    if s.now >= until or not node_notices.may_ranks_run(s):
        return True, None
    return False, until
