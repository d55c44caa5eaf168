"""Suspension: everything is given back; resuming resolves the job anew."""

from __future__ import annotations

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import ConditionType, Phase
from everstep_operator.plan import job_outcome, pod_replacement
from everstep_operator.plan.actions import DeletePods, DeleteStaleObjects
from everstep_operator.plan.decision import Decision
from everstep_operator.plan.plan_context import PlanContext

_UNRESOLVED = frozenset(
    {
        Reason.POOL_NOT_FOUND.value,
        Reason.NAMESPACE_NOT_ALLOWED.value,
        Reason.NO_ON_DEMAND_POOL.value,
        Reason.UNKNOWN_FIELDS.value,
        Reason.NOT_PERMITTED.value,
        Reason.INVALID_TEMPLATE.value,
    }
)


def suspend_job(s: PlanContext) -> Decision:
    """Delete all pods with their grace; the job is suspended once they are gone."""
    if s.observed.ours:
        kept = pod_replacement.describe_kept_pod(s)
        first = s.observed.ours[0]
        where = f"{first.name} on {first.node}" if first.node else first.name
        waiting = f"waiting for the pods to stop: {where}, {len(s.observed.ours)} in all"
        if (refused := _find_refused_deletion(s)) is not None:
            going = Decision(Phase.STOPPING, Reason.SUSPENDED, refused, stalled=True)
        else:
            going = Decision(Phase.STOPPING, Reason.SUSPENDED, waiting if kept is None else kept[1])
        return going.with_actions(pod_replacement.make_deletion(s.observed.ours, Reason.SUSPENDED))
    done = Decision(Phase.SUSPENDED, Reason.SUSPENDED, "no pods; set spec.suspend to false to start")
    if s.phase is not Phase.SUSPENDED and s.template is not None:
        return done.with_actions(DeleteStaleObjects(s.template.epoch + 1))
    return done


def _find_refused_deletion(s: PlanContext) -> str | None:
    """Return why admission rejects the deletion of pods, as it has said now, or before about the same pods."""
    refused = s.observed.rejection
    if refused is not None and isinstance(refused.action, DeletePods):
        return f"the pods cannot be deleted, and hold their nodes: {refused.message}"
    known = s.status.condition(ConditionType.STALLED)
    if s.phase is not Phase.STOPPING or known is None or known.status != "True" or known.reason != Reason.SUSPENDED:
        return None
    return known.message if any(pod.live for pod in s.observed.ours) else None


def find_own_outcome(s: PlanContext) -> job_outcome.JobOutcome | None:
    """Return the end to which the job has come by itself, though it is suspended: it is not to be trained again.

    A leader that says so knows which ranks ended by themselves. Exit codes after pods were told to stop prove nothing,
    and neither does a failure then: both may be answers to the signal.
    """
    if not (s.spec.suspend or (is_resuming(s) and not _is_edited(s))):
        return None
    outcome = job_outcome.find_outcome(s)
    # A job that could not be resolved at its resume has had its pods deleted too, whether or not the cache shows it.
    told_to_stop = s.phase in (Phase.STOPPING, Phase.PENDING) or any(pod.deleting for pod in s.current.values())
    if outcome is None or (told_to_stop and (s.plain or outcome.phase is Phase.FAILED)):
        return None
    return outcome


def is_resuming(s: PlanContext) -> bool:
    """Return whether spec.suspend went back to false: while the job was suspended, while its pods were still stopping,
    or unseen."""
    if _is_edited(s):
        return True
    if s.phase is Phase.SUSPENDED:
        return True
    if s.phase is Phase.PENDING and s.open is not None and s.open.reason in _UNRESOLVED:
        return s.template is not None  # it was to be resolved anew, and could not be
    return s.phase is Phase.STOPPING and s.open is not None and s.open.reason == Reason.SUSPENDED


def _is_edited(s: PlanContext) -> bool:
    """Tell whether the pods would be built from something else: a suspension came and went while nobody looked."""
    if s.job.metadata.generation == s.status.observed_generation:
        return False  # what differs, the CRDs have lost or gained: older ones that somebody has installed drop fields
    if s.template is None or s.job.unknown_fields or s.template.spec_hash in ("", s.spec.pods_hash()):
        return False
    return s.template.spec_hash != s.spec.legacy_pods_hash()
