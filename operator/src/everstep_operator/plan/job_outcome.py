"""The end of a job: its leader reports it, else agents' termination messages, else (plain mode) exit codes."""

from __future__ import annotations

from dataclasses import dataclass

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import LastFailure, Phase
from everstep_operator.plan import pod_replacement, restart_budget
from everstep_operator.plan.plan_context import PlanContext


@dataclass(frozen=True)
class JobOutcome:
    phase: Phase  # Succeeded or Failed
    reason: Reason
    message: str
    failure: LastFailure | None = None


def find_outcome(s: PlanContext) -> JobOutcome | None:
    """Return the end of the job, or None if it has not come."""
    return _find_plain_outcome(s) if s.plain else _find_leader_outcome(s) or _find_termination_outcome(s)


def has_stopped(s: PlanContext) -> bool:
    """Return whether a job that was told to stop has done so."""
    if s.leader is not None and s.leader.outcome is not None:
        return True
    return all(p.ended is not None for p in s.current.values())


def _find_leader_outcome(s: PlanContext) -> JobOutcome | None:
    if s.leader is None or s.leader.outcome is None:
        return None
    outcome = s.leader.outcome
    if outcome.result == "succeeded":
        return JobOutcome(Phase.SUCCEEDED, Reason.COMPLETED, "all ranks ended with exit code 0")
    if outcome.result != "failed":
        # "stopped" without our asking: pod 0 was told to leave. That is a lost pod, no end of the job.
        return None
    entry = next((e for e in reversed(s.leader.history) if e.id == outcome.failure), None)
    cause = entry.cause if entry is not None else ""
    reason = restart_budget.REASON_OF_REPORTED_CAUSE.get(cause, Reason.APPLICATION_ERROR)
    failure = None
    if entry is not None:
        pod = s.current.get(entry.index) if entry.index is not None else None
        failure = restart_budget.make_entry_failure(entry, reason, pod.node if pod is not None else None)
    status = entry.exit_code if entry is not None else None
    return _make_failed_outcome(s, reason, outcome.message or (entry.message if entry else ""), failure, status)


def _find_termination_outcome(s: PlanContext) -> JobOutcome | None:
    """Return the end that a termination message tells of, or None.

    Agents leave only when their leader declares the end, so one such message is enough: pod 0's, which may outlive the
    operator's absence, or another's of this epoch, when pod 0 is gone before anybody asked it.
    """
    for pod in s.current.values():
        word = pod.ended.word if pod.ended is not None else None
        if word is None or word.result not in ("succeeded", "failed"):
            continue
        if pod.index != 0 and word.epoch != s.status.epoch:
            continue
        if word.result == "succeeded":
            return JobOutcome(Phase.SUCCEEDED, Reason.COMPLETED, "all ranks ended with exit code 0")
        reason = Reason.OUT_OF_MEMORY if pod_replacement.is_out_of_memory(pod) else Reason.APPLICATION_ERROR
        failure = restart_budget.make_pod_failure(pod, reason)
        return _make_failed_outcome(s, reason, word.message, failure, failure.exit_code)
    return None


def _find_plain_outcome(s: PlanContext) -> JobOutcome | None:
    pods = list(s.current.values())
    whole = len(pods) == s.wanted and not any(restart_budget.is_set_charged(s.status.restarts, p) for p in pods)
    if whole and all(pod_replacement.has_succeeded(p) for p in pods):
        return JobOutcome(Phase.SUCCEEDED, Reason.COMPLETED, "all containers ended with exit code 0")
    return None


def _make_failed_outcome(
    s: PlanContext, reason: Reason, message: str, failure: LastFailure | None, exit_status: int | None
) -> JobOutcome:
    if (fatal := restart_budget.find_fatal_exit(s, reason, exit_status)) is not None:
        fatal_reason, said = fatal
        return JobOutcome(Phase.FAILED, fatal_reason, f"{said}: {message}" if message else said, failure)
    if s.spec.restart.application > 0:
        # The leader restarts as long as it is allowed to: that it gave up says the allowance is spent.
        return JobOutcome(
            Phase.FAILED, Reason.RESTART_BUDGET_EXCEEDED, message or Reason.RESTART_BUDGET_EXCEEDED.meaning, failure
        )
    return JobOutcome(Phase.FAILED, reason, message or reason.meaning, failure)
