"""Conditions of a job, in the words of kstatus (Ready, Reconciling, Stalled) and of Kubernetes Jobs (Complete, Failed,
Suspended). A time changes only when its status does."""

from __future__ import annotations

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import CheckpointStatus, Condition, ConditionType, Phase
from everstep_operator.plan import node_trouble, pool_selection, volume_claims
from everstep_operator.plan.checkpoint_status import describe_overdue, find_overdue_time
from everstep_operator.plan.decision import Decision
from everstep_operator.plan.plan_context import PlanContext, to_utc

_MAX = 4096
_ENDS = frozenset({ConditionType.COMPLETE, ConditionType.FAILED})
_WantedCondition = tuple[bool, Reason, str]


def build_conditions(s: PlanContext, decision: Decision, checkpoint: CheckpointStatus | None = None) -> list[Condition]:
    """Return all conditions after the decision, in a fixed order.

    Args:
        s: The job at this moment.
        decision: What was decided.
        checkpoint: Its checkpoints.
    """
    wishes = _wanted_conditions(s, decision) | _judge_checkpoints(s, decision, checkpoint)
    generation = s.job.metadata.generation
    made = []
    for kind in ConditionType:
        old = s.status.condition(kind)
        wish = wishes.get(kind)
        if wish is None:
            # Kept as it was: a condition that is not judged now has not changed. But an end of a job that goes on is
            # somebody else's word.
            if old is not None and kind not in _ENDS:
                made.append(old.model_copy(update={"observed_generation": generation}))
            continue
        status = "True" if wish[0] else "False"
        same = old is not None and old.status == status
        made.append(
            Condition.model_construct(
                type=kind,
                status=status,
                reason=wish[1].value,
                message=wish[2][:_MAX],
                last_transition_time=old.last_transition_time if same and old is not None else to_utc(s.now),
                observed_generation=generation,
            )
        )
    return made


def _judge_checkpoints(
    s: PlanContext, decision: Decision, checkpoint: CheckpointStatus | None
) -> dict[ConditionType, _WantedCondition]:
    """Return whether the newest checkpoint is too old; nothing of a job that never saved too late."""
    if decision.phase is not Phase.RUNNING:
        return {}
    overdue = find_overdue_time(s, checkpoint)
    if overdue is not None and s.now >= overdue:
        return {ConditionType.CHECKPOINT_STALE: (True, Reason.CHECKPOINT_OVERDUE, describe_overdue(s))}
    if s.status.condition(ConditionType.CHECKPOINT_STALE) is None:
        return {}
    return {ConditionType.CHECKPOINT_STALE: (False, Reason.CHECKPOINT_CURRENT, "")}


def _wanted_conditions(s: PlanContext, decision: Decision) -> dict[ConditionType, _WantedCondition]:
    phase, reason, message = decision.phase, decision.reason, decision.message
    failed, finished = phase is Phase.FAILED, phase.finished
    ready = phase in (Phase.RUNNING, Phase.SUCCEEDED)
    stalled = failed or decision.stalled
    waits = finished or phase in (Phase.RUNNING, Phase.SUSPENDED)
    wishes: dict[ConditionType, _WantedCondition] = {
        ConditionType.READY: (ready, reason, message),
        ConditionType.RECONCILING: (not waits, Reason.UP_TO_DATE if waits else reason, "" if waits else message),
        ConditionType.STALLED: (stalled, reason if stalled else Reason.IN_PROGRESS, message if stalled else ""),
    }
    # As for a Kubernetes Job: the ends appear when they are true, and `kubectl wait` waits for that.
    if phase is Phase.SUCCEEDED:
        wishes[ConditionType.COMPLETE] = (True, reason, message)
    if failed:
        wishes[ConditionType.FAILED] = (True, reason, message)
    if phase is Phase.SUSPENDED:
        wishes[ConditionType.SUSPENDED] = (True, Reason.SUSPENDED, message)
    elif s.status.is_true(ConditionType.SUSPENDED) and not s.spec.suspend:
        wishes[ConditionType.SUSPENDED] = (False, Reason.RESUMED, "")
    if decision.plain_reason is not None:
        wishes[ConditionType.PLAIN_MODE] = (True, *decision.plain_reason)
    elif decision.template is not None and not decision.template.plain and s.status.is_true(ConditionType.PLAIN_MODE):
        wishes[ConditionType.PLAIN_MODE] = (False, Reason.AGENT_IN_USE, "")
    if s.degraded and not finished:
        text = Reason.AGENT_UNREACHABLE.meaning
        wishes[ConditionType.DEGRADED] = (True, Reason.AGENT_UNREACHABLE, text)
    elif (
        s.leader is not None
        and s.leader.reachable
        and (phase is Phase.RUNNING or s.status.is_true(ConditionType.DEGRADED))
    ):
        wishes[ConditionType.DEGRADED] = (False, Reason.AGENT_REACHABLE, "")
    if not finished and (short := pool_selection.describe_shortage(s)) is not None:
        wishes[ConditionType.CAPACITY_AVAILABLE] = (False, Reason.WAITING_FOR_CAPACITY, short)
    elif (s.all_bound or finished) and s.status.condition(ConditionType.CAPACITY_AVAILABLE) is not None:
        wishes[ConditionType.CAPACITY_AVAILABLE] = (True, Reason.SCHEDULED, "")
    if not finished and (unshared := volume_claims.describe_unshared_claims(s)) is not None:
        wishes[ConditionType.VOLUMES_SHARED] = (False, Reason.READ_WRITE_ONCE, unshared)
    elif s.observed.claims and s.status.condition(ConditionType.VOLUMES_SHARED) is not None:
        wishes[ConditionType.VOLUMES_SHARED] = (True, Reason.VOLUMES_SHARED, "")
    old = s.status.condition(ConditionType.NODES_HEALTHY)
    if not finished and (wrong := node_trouble.find_node_trouble(s, decision.disruption)) is not None:
        wishes[ConditionType.NODES_HEALTHY] = (False, *wrong)
    elif not finished and old is not None and old.status == "False":
        wishes[ConditionType.NODES_HEALTHY] = (True, Reason.NODES_HEALTHY, "")
    return wishes
