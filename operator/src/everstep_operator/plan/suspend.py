"""Suspension: everything is given back; resuming resolves the job anew."""

from __future__ import annotations

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase
from everstep_operator.plan import end, replace
from everstep_operator.plan.actions import DeleteStale
from everstep_operator.plan.decision import Decision
from everstep_operator.plan.situation import Situation


def suspend(s: Situation) -> Decision:
    """Delete all pods with their grace; the job is suspended once they are gone."""
    if s.observed.ours:
        going = Decision(Phase.STOPPING, Reason.SUSPENDED, "waiting for the pods to stop")
        return going.do(replace.refs(s.observed.ours, Reason.SUSPENDED))
    done = Decision(Phase.SUSPENDED, Reason.SUSPENDED, "no pods; set spec.suspend to false to start")
    if s.phase is not Phase.SUSPENDED and s.template is not None:
        return done.do(DeleteStale(s.template.epoch + 1))
    return done


def own_end(s: Situation) -> end.End | None:
    """Return the end to which the job has come by itself, though it is suspended: it is not to be trained again.

    A leader that says so knows which ranks ended by themselves. Exit codes after pods were told to stop prove nothing,
    and neither does a failure then: both may be answers to the signal.
    """
    if not (s.spec.suspend or (resuming(s) and not _edited(s))):
        return None
    outcome = end.outcome(s)
    told_to_stop = s.phase is Phase.STOPPING or any(pod.deleting for pod in s.current.values())
    if outcome is None or (told_to_stop and (s.plain or outcome.phase is Phase.FAILED)):
        return None
    return outcome


def resuming(s: Situation) -> bool:
    """Return whether spec.suspend went back to false: while the job was suspended, while its pods were still stopping,
    or unseen."""
    if _edited(s):
        return True
    if s.phase is Phase.SUSPENDED:
        return True
    if s.phase is Phase.PENDING and s.open is not None and s.open.reason == Reason.POOL_NOT_FOUND:
        return s.template is not None  # it was to be resolved anew, and had no pool to be resolved for
    return s.phase is Phase.STOPPING and s.open is not None and s.open.reason == Reason.SUSPENDED


def _edited(s: Situation) -> bool:
    """Tell whether the pods would be built from something else: a suspension came and went while nobody looked."""
    if s.template is None or s.template.spec_hash in ("", s.spec.pods_hash()):
        return False
    return s.template.spec_hash != s.spec.former_pods_hash()
