"""Charges restarts to budgets. Every ended generation is charged once, to one cause, by the id that the leader gave it.

With a leader its generation history is the only source: an entry newer than the newest charge is charged, none else.
Without one (pod 0 is lost, plain mode, degraded) the operator charges the last generation that it saw running, under
the same kind of id, so that whatever both know of is charged by the one who comes first and skipped by the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from everstep_operator.api.reasons import Reason
from everstep_operator.api.restart import ExitCodeAction
from everstep_operator.api.status import MAX_LOG_LINES, Cause, Charge, LastFailure, Phase, Restarts
from everstep_operator.plan import node_trouble, plain_mode, pod_replacement
from everstep_operator.plan.decision import parse_reason
from everstep_operator.plan.leader_view import MAX_ORDINAL, LeaderView, ReportedGeneration
from everstep_operator.plan.observation import INIT_FAILED, PodView
from everstep_operator.plan.plan_context import PlanContext, to_utc

# So long a "pod lost" waits for the pod's own last state, which tells an OOM or a pre-emption from a network fault; and
# so long if its agent is still silent: its node may be dead (`node_loss`).
FATE_WAIT_SECONDS = 10.0
SILENT_FATE_WAIT_SECONDS = 40.0
# A plain set that ran for so long does not count earlier failures of the program, as with a leader.
STABLE_AFTER_SECONDS = 600.0

# What a leader's word for a cause says by itself; a lost pod has yet to be looked at.
REASON_OF_REPORTED_CAUSE = {
    "Application": Reason.APPLICATION_ERROR,
    "OutOfMemory": Reason.OUT_OF_MEMORY,
    "Hang": Reason.HANG,
    "Fenced": Reason.FENCED,
}
_CAUSE_OF_REASON = {
    Reason.APPLICATION_ERROR: Cause.APPLICATION,
    Reason.OUT_OF_MEMORY: Cause.APPLICATION,
    Reason.HANG: Cause.APPLICATION,
    Reason.PREEMPTED: Cause.PREEMPTION,
    **dict.fromkeys(pod_replacement.NOTICE_REASONS.values(), Cause.PREEMPTION),
}


# Nobody has seen the container end: its machine was started anew (containerd: 255, kubelets: 137).
_UNKNOWN_ENDS = frozenset({"Unknown", "ContainerStatusUnknown"})
_PROGRAM_CAUSES = (Cause.APPLICATION, Cause.IGNORED)


@dataclass(frozen=True)
class RestartBudget:
    """Restarts after everything known was charged. `exhausted`: (reason, message) if a budget is overdrawn."""

    restarts: Restarts
    generation: int
    last_failure: LastFailure | None = None  # None: nothing new
    exhausted: tuple[Reason, str] | None = None
    retry_at: float | None = None


def charge_ended_generations(s: PlanContext, *, over: bool = False) -> RestartBudget:
    """Charge the generations that ended since the last pass. `over`: the job has an outcome, so that a pod's end is no
    loss."""
    restarts = before = s.status.restarts  # `before` the newest charge
    failure, retry_at, fatal = None, None, None
    generation = min(s.status.generation, MAX_ORDINAL)  # an older version stored what a leader made up
    head = s.head
    if s.leader is not None or over:
        for entry in _list_ended_generations(s, over):
            if restarts.last is not None and entry.order <= restarts.last.token:
                continue
            if entry.order[0] > s.status.epoch:
                continue  # made up: it would be newer than whatever ends from now on
            if entry.cause == "Stopped":
                continue
            reason = _find_entry_reason(s, entry, restarts) or (_fallback_reason(entry) if over else None)
            if reason is None:
                # Charges are in the order of generations: the later ones wait with this one.
                retry_at = (entry.ended_at or s.now) + _find_fate_wait(s, entry)
                break
            failure = _make_failure(s, entry, reason)
            before, restarts = restarts, _add_charge(s, restarts, entry.id, reason, failure.node, entry.exit_code)
            fatal = find_fatal_exit(s, reason, entry.exit_code)
            if fatal is not None:
                break
        generation = _last_run_generation(s, s.leader) if s.leader is not None else generation
    elif s.plain and (broken := _find_plain_loss(s)) is not None:
        epoch, pod = broken
        if not restarts.last or restarts.last.token < (epoch, 1):
            reason = _explain_plain_loss(s, pod)
            status = pod.ended.exit_code if pod is not None and pod.ended is not None else None
            failure = make_pod_failure(pod, reason)
            before, restarts = restarts, _add_charge(s, restarts, f"{epoch}.1", reason, failure.node, status)
            fatal = find_fatal_exit(s, reason, status)
    if not over and not s.plain and s.phase in (Phase.RUNNING, Phase.RESTARTING) and generation >= 1:
        dead = head is None or not (head.live or node_trouble.may_come_back(s, head))
        # In degraded mode nobody tells of lost pods either; one charge per generation seen keeps it from being free.
        lost = (pod for pod in pod_replacement.list_lost_pods(s) if not node_trouble.may_come_back(s, pod))
        loss = head if dead else next(lost, None) if s.degraded else None
        # A pod 0 of an older epoch is a late read: its end is on record since the epoch was raised.
        known = head is None or head.epoch == s.status.epoch
        newest = restarts.last.token if restarts.last is not None else (0, 0)
        if known and (dead or loss is not None) and newest < (s.status.epoch, generation):
            reason = pod_replacement.explain_pod_loss(s, loss)
            failure = make_pod_failure(loss, reason)
            before, restarts = (
                restarts,
                _add_charge(s, restarts, f"{s.status.epoch}.{generation}", reason, failure.node),
            )
    exhausted = fatal or _find_exhausted_budget(s, restarts)
    if exhausted is not None:
        # What found the budget empty ends the job: no restart came of it, so none is counted.
        restarts = before
    restarts = _note_progress(s, restarts)
    return RestartBudget(restarts, generation, failure, exhausted, retry_at)


def _list_ended_generations(s: PlanContext, over: bool) -> list[ReportedGeneration]:
    """Return the generations that the leader told of, and when all is over those in agent 0's termination message: what
    happened while no operator asked counts too."""
    word = s.head.ended.word if over and s.head is not None and s.head.ended is not None else None
    known = {entry.id: entry for entry in word.history} if word is not None else {}
    if s.leader is not None:
        known.update((entry.id, entry) for entry in s.leader.history)
    return sorted(known.values(), key=lambda entry: entry.order)


def count_remaining_restarts(s: PlanContext, restarts: Restarts) -> int:
    """Return the application restarts left after the newest charge: what the leader may still do on its own."""
    return max(0, s.spec.restart.application - restarts.within(Cause.APPLICATION, _find_count_start(s, restarts)))


def find_next_expiry(s: PlanContext, restarts: Restarts) -> float | None:
    """Return when the leader may restart more than now, because earlier restarts count no more: it learns that by a
    plan alone, and a failure a minute later would end the job. None: never."""
    start, policy = _find_count_start(s, restarts), s.spec.restart
    counted = [each.time for each in restarts.charges if each.cause is Cause.APPLICATION and each.time > start]
    if not counted:
        return None
    ends = [min(counted) + policy.window]
    if policy.reset_after is not None and restarts.progress_since is not None:
        ends.append(restarts.progress_since + policy.reset_after)
    return min((at for each in ends if (at := each.timestamp()) > s.now), default=None)


def find_fatal_exit(s: PlanContext, reason: Reason, exit_status: int | None) -> tuple[Reason, str] | None:
    """Return why the job fails at once after this exit of its program, or None.

    Args:
        s: What the plan is made from.
        reason: Why the generation has ended.
        exit_status: The exit code, or 128 and the number of the signal.
    """
    if _find_action(s, reason, exit_status) is not ExitCodeAction.FAIL:
        return None
    return Reason.FATAL_EXIT_CODE, f"a rank exited with code {exit_status}, for which restart.onExitCodes says Fail"


def _find_action(s: PlanContext, reason: Reason, exit_status: int | None) -> ExitCodeAction:
    if reason is not Reason.APPLICATION_ERROR:
        return ExitCodeAction.RETRY  # a kill for memory has an exit code too
    return s.spec.restart.find_action(exit_status)


def _find_count_start(s: PlanContext, restarts: Restarts) -> datetime:
    """Return the time after which restarts count."""
    starts = [to_utc(s.now - s.spec.restart.window.total_seconds())]
    if s.spec.restart.reset_after is not None:
        starts += [time for time in (restarts.reset_at, _find_reset(s, restarts)) if time is not None]
    return max(starts)


def _find_reset(s: PlanContext, restarts: Restarts) -> datetime | None:
    """Return the beginning of the progress that has gone on for `resetAfter`, or None."""
    since, span = restarts.progress_since, s.spec.restart.reset_after
    return since if since is not None and span is not None and since + span <= to_utc(s.now) else None


def end_progress(s: PlanContext) -> Restarts | None:
    """Return the restarts of a job that is suspended: what follows is no progress, until ranks run again. None: they
    stay as they are."""
    known = s.status.restarts
    if known.progress_since is None:
        return None
    return known.model_copy(update={"progress_since": None, "reset_at": _find_reset(s, known) or known.reset_at})


def _note_progress(s: PlanContext, restarts: Restarts) -> Restarts:
    """Return the restarts with the time of the first step beyond all that were made before the newest one."""
    known = s.leader.progress if s.leader is not None else None
    if s.spec.restart.reset_after is None or restarts.progress_since is not None or known is None:
        return restarts
    if not restarts.charges or known.step is None or known.step <= (restarts.trained_step or 0):
        return restarts
    if restarts.last != s.status.restarts.last or s.phase is not Phase.RUNNING:
        return restarts  # this may still be the step of the generation that has ended
    return restarts.model_copy(update={"progress_since": to_utc(s.now)})


def find_backoff_end(s: PlanContext) -> float | None:
    """Return when a plain set may be created again after failures of its program, or of its init containers, in a row;
    None: now.

    The first restart comes at once, then after 1, 2, 4 ... seconds up to `restart.maxBackoff`, as leaders do it.
    """
    charges, most = s.status.restarts.charges, s.spec.restart.max_backoff.total_seconds()
    if not s.plain or not charges or not _is_backed_off(charges[-1]):
        return None
    in_row, pause, before = 0, 0.0, float("-inf")
    for charge in charges:
        if _is_backed_off(charge):
            at = charge.time.timestamp()
            in_row = charge.count + (in_row if at - before - pause < STABLE_AFTER_SECONDS else 0)
            pause = min(2.0 ** min(in_row - 2, 30), most) if in_row > 1 else 0.0
            before = at
    return before + pause if s.now < before + pause else None


def _is_backed_off(charge: Charge) -> bool:
    return charge.cause in _PROGRAM_CAUSES or charge.reason == Reason.START_FAILED.value


def is_set_charged(restarts: Restarts, pod: PodView) -> bool:
    """Return whether the set this pod belongs to has been charged, so that all of it goes (plain mode)."""
    return restarts.last is not None and restarts.last.token >= (pod.epoch, 1)


def make_pod_failure(pod: PodView | None, reason: Reason) -> LastFailure:
    end = pod.ended if pod is not None else None
    word = end.word if end is not None else None
    return LastFailure(
        cause=_CAUSE_OF_REASON.get(reason, Cause.INFRASTRUCTURE),
        reason=reason.value,
        node=pod.node if pod is not None else None,
        rank=word.rank if word else None,
        exit_code=(word.exit_code if word and word.exit_code is not None else end.exit_code) if end else None,
        message=(word.message if word else end.message) if end else "the pod is gone",
        log_tail=list(word.log_tail[-MAX_LOG_LINES:]) if word else [],
    )


def make_entry_failure(entry: ReportedGeneration, reason: Reason, node: str | None) -> LastFailure:
    return LastFailure(
        cause=_CAUSE_OF_REASON.get(reason, Cause.INFRASTRUCTURE),
        reason=reason.value,
        node=node,
        rank=entry.rank,
        exit_code=entry.exit_code,
        message=entry.message,
        log_tail=list(entry.log_tail[-MAX_LOG_LINES:]),
    )


def _make_failure(s: PlanContext, entry: ReportedGeneration, reason: Reason) -> LastFailure:
    pod = s.current.get(entry.index) if entry.index is not None else None
    if entry.cause in ("PodLost", "Leaving") and _is_lost_pod(pod, entry) and pod is not None and pod.ended:
        return make_pod_failure(pod, reason)
    return make_entry_failure(entry, reason, pod.node if pod and not is_replacement(s, pod) else None)


def _add_charge(
    s: PlanContext, restarts: Restarts, name: str, reason: Reason, node: str | None, exit_status: int | None = None
) -> Restarts:
    ignored = _find_action(s, reason, exit_status) is ExitCodeAction.IGNORE
    cause = Cause.IGNORED if ignored else _CAUSE_OF_REASON.get(reason, Cause.INFRASTRUCTURE)
    charged = restarts.charge(Charge(id=name, cause=cause, time=to_utc(s.now), reason=reason.value, node=node))
    if s.spec.restart.reset_after is None:
        return charged
    known = s.leader.progress.step if s.leader is not None and s.leader.progress is not None else None
    told = s.status.progress.step if s.status.progress is not None else None
    steps = [step for step in (known, told, restarts.trained_step) if step is not None]
    reset_at = _find_reset(s, restarts) or restarts.reset_at
    changes = {"trained_step": max(steps, default=None), "progress_since": None, "reset_at": reset_at}
    return charged.model_copy(update=changes)


def _find_entry_reason(s: PlanContext, entry: ReportedGeneration, restarts: Restarts) -> Reason | None:
    """Return the reason of an ended generation; None: it cannot be told yet."""
    if entry.cause in REASON_OF_REPORTED_CAUSE:
        return REASON_OF_REPORTED_CAUSE[entry.cause]
    pod = s.current.get(entry.index) if entry.index is not None else None
    if (pod is None or is_replacement(s, pod)) and (noted := _find_noted_loss(s, restarts)) is not None:
        return noted
    if pod is None and (announced := pod_replacement.explain_pod_loss(s, None)) is not Reason.POD_DELETED:
        return announced
    if pod is not None and _is_lost_pod(pod, entry):
        if not pod.live:
            return pod_replacement.explain_pod_loss(s, pod)
        if s.now < (entry.ended_at or s.now) + _find_fate_wait(s, entry) and entry.ended_at is not None:
            return None
    return _fallback_reason(entry)


def _find_fate_wait(s: PlanContext, entry: ReportedGeneration) -> float:
    silent = s.leader is not None and entry.index in s.leader.missing
    return SILENT_FATE_WAIT_SECONDS if silent else FATE_WAIT_SECONDS


def _fallback_reason(entry: ReportedGeneration) -> Reason:
    """Return the reason that is given when nothing more will be known: after the end of a job nobody looks again."""
    return Reason.POD_DELETED if entry.cause == "Leaving" else Reason.POD_LOST


def _find_noted_loss(s: PlanContext, restarts: Restarts) -> Reason | None:
    """Return the loss for which this restart began, or None if it began otherwise, or is charged already.

    Survivors may take longer to stop than a lost pod to be gone: then the transition alone tells why it was lost.
    """
    since = s.since({Phase.RESTARTING})
    if s.phase is not Phase.RESTARTING or is_restart_charged(s, restarts):
        return None
    noted = (parse_reason(t.reason) for t in s.status.transitions if t.start.timestamp() >= since)
    return next((reason for reason in noted if reason in pod_replacement.LOSS_REASONS), None)


def is_restart_charged(s: PlanContext, restarts: Restarts) -> bool:
    """Return whether the generation that broke when this restart began has been charged."""
    return restarts.last is not None and restarts.last.time.timestamp() >= s.since({Phase.RESTARTING})


def is_replacement(s: PlanContext, pod: PodView) -> bool:
    """Return whether a pod was created since this restart began. The API server tells creation in whole seconds."""
    return s.phase is Phase.RESTARTING and pod.created + 1.0 > s.since({Phase.RESTARTING})


def _is_lost_pod(pod: PodView | None, entry: ReportedGeneration) -> bool:
    """Return whether the pod of this index now is the one the entry is about, and not its replacement."""
    return pod is not None and (entry.ended_at is None or pod.created <= entry.ended_at)


def _last_run_generation(s: PlanContext, leader: LeaderView) -> int:
    """Return the last generation of this epoch known to have run: one that still forms has not cost anything yet."""
    if leader.epoch != s.status.epoch:
        return min(s.status.generation, MAX_ORDINAL)
    seen = [e.order[1] for e in leader.history if e.order[0] == leader.epoch]
    if leader.phase in ("running", "stopping", "ended"):
        seen.append(leader.generation)
    return min(MAX_ORDINAL, max([s.status.generation, *seen]))


def _find_plain_loss(s: PlanContext) -> tuple[int, PodView | None] | None:
    """Return the epoch of the set and the pod that broke it, or None if the present set of plain pods is whole."""
    pods = [p for p in s.current.values() if not is_set_charged(s.status.restarts, p)]
    epoch = max((p.epoch for p in pods), default=s.status.epoch)
    failed = [p for p in pods if p.ended is not None and not pod_replacement.has_succeeded(p)]
    if failed:
        # The first to fail is the cause; its peers fail because it left. Kubernetes tells whole seconds: of several in
        # one, a code that the job has a rule for is what a program chose, and no peer's end.
        return epoch, min(failed, key=lambda pod: _rank_plain_failure(s, pod))
    if s.phase is Phase.RUNNING and pod_replacement.list_missing_indices(s):
        return epoch, None
    if s.phase in (Phase.STARTING, Phase.RUNNING) and (going := [p for p in pods if not p.live and not p.ended]):
        return epoch, going[0]
    return None


def _rank_plain_failure(s: PlanContext, pod: PodView) -> tuple[float, bool, int]:
    end = pod.ended
    assert end is not None
    is_listed = _has_failed_itself(pod) and any(end.exit_code in rule.codes for rule in s.spec.restart.on_exit_codes)
    return end.finished_at or s.now, not is_listed, pod.index


def _explain_plain_loss(s: PlanContext, pod: PodView | None) -> Reason:
    if pod is not None and pod.ended is not None and pod.ended.reason == INIT_FAILED and not pod.deleting:
        return Reason.START_FAILED  # of what was to prepare the program, which has not run
    return Reason.APPLICATION_ERROR if _has_failed_itself(pod) else pod_replacement.explain_pod_loss(s, pod)


def _has_failed_itself(pod: PodView | None) -> bool:
    return (
        pod is not None
        and pod.ended is not None
        and pod.ended.exit_code is not None
        and not pod.deleting
        and pod.disruption is None
        and not pod_replacement.is_out_of_memory(pod)
        and not pod_replacement.was_told_to_stop(pod)
        and pod.ended.reason not in _UNKNOWN_ENDS | {INIT_FAILED}
        and not plain_mode.has_node_failed(pod.ended)
    )


def _find_exhausted_budget(s: PlanContext, restarts: Restarts) -> tuple[Reason, str] | None:
    """Return which budget a new charge has found empty, or None. Ranks that run have paid for their start: that a
    budget is lowered, or its window made longer, ends no job before the next failure."""
    since = _find_count_start(s, restarts)
    budget, known = s.spec.restart, s.status.restarts
    for cause, limit, reason in (
        (Cause.APPLICATION, budget.application, Reason.RESTART_BUDGET_EXCEEDED),
        (Cause.INFRASTRUCTURE, budget.infrastructure, Reason.INFRASTRUCTURE_BUDGET_EXCEEDED),
    ):
        used = restarts.within(cause, since)
        if used > limit and restarts.count(cause) > known.count(cause):
            window = int(budget.window.total_seconds())
            return reason, f"{used} failures within {window} s; restart.{cause.value.lower()} allows {limit} restarts"
    return None
