"""Ask the policies in their order, and make one plan of what they decide."""

from __future__ import annotations

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase, Restarts
from everstep_operator.plan import (
    disruption_budget,
    gang,
    job_outcome,
    job_service,
    node_loss,
    node_notices,
    node_trouble,
    plain_mode,
    pod_creation,
    pod_replacement,
    pool_selection,
    restart_budget,
    start_failures,
    suspend,
    timeouts,
    ttl,
)
from everstep_operator.plan.actions import CreatePods, DryRun, JobPlan, LeaderPoll, PushPeers, StopLeader
from everstep_operator.plan.agent_config import find_agent_port, find_termination_grace
from everstep_operator.plan.decision import Decision, parse_reason
from everstep_operator.plan.observation import Observation
from everstep_operator.plan.plan_context import FORMING_PHASES, RUN_PHASES, PlanContext
from everstep_operator.plan.pool_selection import PoolSelection
from everstep_operator.plan.rejection import Rejection
from everstep_operator.plan.restart_budget import RestartBudget
from everstep_operator.plan.start_failures import StartRecord
from everstep_operator.plan.status import build_status, update_ended_status

_CONFIRM_SECONDS = 5.0  # until a leader's answer is read again that may be older than a lost pod
_STOP_MARGIN = 15.0  # after the pods' grace: a leader that is gone will not say that it stopped


def make_plan(observed: Observation, now: float) -> JobPlan:
    """Decide what is to be done about one job, given all that is known about it.

    Args:
        observed: The observation, taken for this pass.
        now: Unix seconds.

    Returns:
        The status to write, and the actions that follow from it; a plan without a status for a job that is not ours.
    """
    s = PlanContext(node_notices.drop_overdue_signals(observed, now), now)
    if not s.job.managed_here or s.job.metadata.deletion_timestamp is not None:
        return JobPlan()
    if s.phase.finished:
        actions, look = ttl.plan_after_end(s)
        status = update_ended_status(s)
        actions = [*disruption_budget.lift_budget(s), *actions]
        poll = _make_poll(s, s.status.restarts, s.phase)
        return JobPlan(status, changed=status is not s.status, actions=tuple(actions), requeue_at=look, poll=poll)
    account = restart_budget.charge_ended_generations(s, over=job_outcome.find_outcome(s) is not None)
    begun = start_failures.count_start_failures(s)
    decision = node_notices.leave_noticed_nodes(s, _decide_next(s, account, begun))
    if not decision.phase.finished:
        buried, later = node_trouble.force_delete_lost_pods(s)
        # First the taint: once the pods are gone, nothing tells any more that their nodes lack it.
        decision = decision.with_actions(*node_trouble.list_nodes_to_mark(s), buried).requeue_at(later)
    decision = disruption_budget.guard_pods(s, decision)
    decision = decision.requeue_at(account.retry_at, s.degraded_at if not s.degraded else None)
    status, events, due = build_status(s, decision)
    looks = [*decision.requeue, *([due] if due is not None else [])]
    if not decision.phase.finished and (deadline := timeouts.next_deadline(s)) is not None:
        looks.append(deadline)
    if not decision.phase.finished and (expiry := restart_budget.find_next_expiry(s, account.restarts)) is not None:
        looks.append(expiry)
    suspects, later = (frozenset(), None) if decision.phase.finished else node_loss.list_suspect_nodes(s)
    looks += [later] if later is not None else []
    ahead = [t for t in looks if t > now]
    return JobPlan(
        status=status,
        # An epoch that the status had lost is known as long as there is a pod of it.
        changed=status is not s.status or status.epoch != s.job.status.epoch,
        actions=decision.actions,
        events=events,
        requeue_at=min(ahead) if ahead else None,
        poll=_make_poll(s, account.restarts, decision.phase),
        holds_leader=_is_head_dead(s) and not decision.phase.finished,
        suspects=suspects,
        node_failures=node_trouble.find_node_failures(s, account.restarts),
    )


def _decide_next(s: PlanContext, account: RestartBudget, begun: StartRecord) -> Decision:
    """Return the decision of the first policy that has something to say; what was charged is on record whoever
    decides."""
    own = suspend.find_own_outcome(s)
    if s.spec.suspend and own is None:
        restarts = restart_budget.end_progress(s)
        return suspend.suspend_job(s).with_fields(generation=account.generation, restarts=restarts)
    if suspend.is_resuming(s) and own is None:
        return _resolve_template(s, Reason.RESUMED)
    decision = (
        (_make_end_decision(own, account) if own is not None else None)
        or _decide_end(s, account)
        or _handle_rejection(s)
        or _decide_failure(s, account, begun)
        or _resolve_anew(s)
        or _advance_job(s, account, begun)
    )
    if decision.generation is None:
        decision = decision.with_fields(generation=account.generation)
    failure = decision.last_failure or account.last_failure
    if failure is None and begun.fresh:
        failure = restart_budget.make_pod_failure(begun.failed, Reason.START_FAILED)
        failure = failure.model_copy(update={"message": begun.message})
    in_a_row = decision.phase is not Phase.RUNNING and decision.template is None
    return decision.with_fields(
        restarts=decision.restarts or account.restarts,
        last_failure=failure,
        start_failures=begun.record if in_a_row else None,
    )


def _decide_end(s: PlanContext, account: RestartBudget) -> Decision | None:
    """Decide about a job that has an outcome, or a stop that we asked for and that has come about."""
    outcome = job_outcome.find_outcome(s)
    if s.phase is Phase.STOPPING and s.open is not None:
        if outcome is not None and outcome.phase is Phase.SUCCEEDED:
            return Decision(outcome.phase, outcome.reason, outcome.message)
        reason, message = parse_reason(s.open.reason), _open_phase_message(s)
        grace = find_termination_grace(s.job, s.observed.settings)
        until = s.open.start.timestamp() + grace + _STOP_MARGIN
        if job_outcome.has_stopped(s) or s.now >= until:
            return _fail_job(s, reason, message)
        return Decision(Phase.STOPPING, reason, message).with_actions(StopLeader(reason.value)).requeue_at(until)
    if outcome is None:
        return None
    return _make_end_decision(outcome, account)


def _make_end_decision(outcome: job_outcome.JobOutcome, account: RestartBudget) -> Decision:
    failure = outcome.failure or account.last_failure
    return Decision(outcome.phase, outcome.reason, outcome.message, last_failure=failure)


def _handle_rejection(s: PlanContext) -> Decision | None:
    """Decide about an action that the API server rejected in this very reconcile."""
    if (refused := s.observed.rejection) is None:
        return None
    pods = isinstance(refused.action, (DryRun, CreatePods))
    # What had pods before was accepted once, so a webhook or a policy has changed since: it may change back, and a job
    # that trained for weeks shall be there then. And what is named but not there may be on its way: the order in which
    # a tool applies a job, its service account and its priority class is nobody's fault.
    denied = refused.kind == "Forbidden" and pods and not pod_creation.is_something_missing(refused.message)
    invalid = refused.kind == "Invalid" and not pod_creation.is_policy_unready(refused.message)
    if s.is_first_creation and (invalid or denied):
        return _fail_job(s, Reason.INVALID_TEMPLATE, refused.told)
    return _wait_while_blocked(s, refused)


_BLOCKING = {"Quota": Reason.QUOTA_EXCEEDED, "Conflict": Reason.NAME_CONFLICT}  # all others: by admission


def _wait_while_blocked(s: PlanContext, refused: Rejection) -> Decision:
    reason = _BLOCKING.get(refused.kind, Reason.ADMISSION_REJECTED)
    phase = Phase.RESTARTING if s.phase in RUN_PHASES else Phase.PENDING
    waiting = Decision(phase, reason, refused.told, again=True, stalled=reason in gang.STALLING_REASONS)
    return waiting.requeue_at(pod_creation.compute_next_attempt(s, refused.message, s.now))


def _decide_failure(s: PlanContext, account: RestartBudget, begun: StartRecord) -> Decision | None:
    """Fail the job if a budget or a limit of time is used up."""
    if account.exhausted is not None:
        return _fail_job(s, *account.exhausted)
    if begun.is_exhausted:
        return _fail_job(s, Reason.START_FAILED, begun.message)
    expired = timeouts.find_expired_limit(s)
    if expired is None or (expired[0] is not Reason.RUNTIME_TIMEOUT and _are_ranks_running(s)):
        return None  # ranks that nobody was there to see start have started
    if s.head is None or not s.head.running or s.plain:
        return _fail_job(s, *expired)
    return Decision(Phase.STOPPING, *expired).with_actions(StopLeader(expired[0].value))


def _resolve_anew(s: PlanContext) -> Decision | None:
    """Resolve the whole set from a new template: at the first start, in plain mode, in the next pool."""
    if s.template is None:
        return _resolve_template(s, Reason.CREATED)
    if s.phase not in FORMING_PHASES | {Phase.RESTARTING} or s.job.unknown_fields:
        return None
    if s.may_become_plain and not s.plain and (found := plain_mode.find_agent_obstacle(s.current.values())) is not None:
        reason, said = found
        message = f"{reason.meaning} {said}".strip()
        return pod_creation.resolve_new_template(
            s,
            PoolSelection(s.pool, s.on_demand_pool),
            plain=True,
            reason=reason,
            message=message,
            plain_reason=(reason, message),
        )
    choice, _ = pool_selection.select_next_pool(s)
    if choice is None:
        return None
    message = pool_selection.describe_move(s, choice)
    moved = pod_creation.resolve_new_template(s, choice, plain=s.plain, reason=Reason.NEXT_POOL, message=message)
    # What the operator allows may be less than when the job began: it goes on by the template that it has.
    return None if moved.phase is Phase.FAILED and s.has_run else moved


def _resolve_template(s: PlanContext, reason: Reason) -> Decision:
    if s.job.unknown_fields:
        waiting = Decision(Phase.PENDING, Reason.UNKNOWN_FIELDS, pod_creation.describe_unknown_fields(s), stalled=True)
        return waiting.with_actions(pod_replacement.make_deletion(s.observed.ours, reason))
    choice = pool_selection.select_first_pool(s)
    if choice.problem is not None and choice.problem[0] in pool_selection.FINAL_PROBLEMS and s.template is None:
        # Every pool that the job names exists and refuses it: nothing that will be here soon changes that.
        return _fail_job(s, *choice.problem)
    if choice.problem is not None:
        return Decision(Phase.PENDING, *choice.problem, stalled=True).with_actions(
            pod_replacement.make_deletion(s.observed.ours, reason)
        )
    plain_reason = (Reason.NO_COMMAND, Reason.NO_COMMAND.meaning) if s.spec.command is None else None
    message = f"{s.wanted} pods are created"
    resolved = pod_creation.resolve_new_template(
        s, choice, plain=plain_reason is not None, reason=reason, message=message, plain_reason=plain_reason
    )
    if resolved.phase is Phase.FAILED and s.template is not None:
        # What was allowed once may be so again, and a wrong edit can be corrected: the job may have trained for weeks.
        return resolved.with_fields(phase=Phase.PENDING, stalled=True)
    return resolved


def _advance_job(s: PlanContext, account: RestartBudget, begun: StartRecord) -> Decision:
    """Keep the set whole and say where it is."""
    if (released := pod_creation.release_pods(s)) is not None:
        return released.with_actions(pod_replacement.make_deletion(s.stale, Reason.STOPPING))
    decision = _determine_phase(s, account).with_fields(restarts=account.restarts)
    if begun.message and decision.phase in (Phase.SCHEDULING, Phase.STARTING, Phase.RESTARTING):
        decision = decision.with_fields(reason=Reason.START_FAILED, message=begun.message)
    elif _has_nothing_new(s, decision) and (text := timeouts.describe_container_wait(s)):
        decision = decision.with_fields(reason=Reason.CONTAINER_WAITING, message=text)
    kept = pod_replacement.describe_kept_pod(s)
    if kept is not None and decision.phase in FORMING_PHASES and decision.reason not in gang.BLOCKED_REASONS:
        decision = decision.with_fields(message=kept[1])
    decision = decision.with_actions(pod_replacement.make_deletion(s.stale, Reason.STOPPING))
    if s.plain:
        broken = [p for p in s.current.values() if restart_budget.is_set_charged(account.restarts, p)]
        decision = decision.with_actions(pod_replacement.make_deletion(broken, Reason.RESTARTING))
        if decision.phase is not Phase.RUNNING and s.head is not None:
            # Pod 0 was lost before its set ran. The ranks of one set have one fencing token.
            older = [p for p in s.current.values() if p.epoch < s.head.epoch and p not in broken]
            decision = decision.with_actions(pod_replacement.make_deletion(older, Reason.RESTARTING))
    else:
        gone, later = pod_replacement.list_deletable_pods(s)
        decision = decision.with_actions(pod_replacement.make_deletion(gone, Reason.POD_LOST)).requeue_at(later)
    anew, later = pod_replacement.list_pods_to_place_anew(s)
    decision = decision.with_actions(pod_replacement.make_deletion(anew, Reason.RESTARTING)).requeue_at(later)
    decision = pod_creation.create_missing_pods(s, decision)
    if pod_creation.has_pod_creation(decision) and decision.phase is Phase.PENDING:
        decision = decision.with_fields(phase=Phase.SCHEDULING, reason=Reason.WAITING_FOR_CAPACITY, stalled=False)
        decision = decision.with_fields(message=Reason.WAITING_FOR_CAPACITY.meaning)
    elif pod_creation.has_pod_creation(decision) and decision.reason in gang.BLOCKED_REASONS:
        decision = decision.with_fields(reason=Reason.RESTARTING, message=Reason.RESTARTING.meaning, stalled=False)
    decision = decision.requeue_at(pod_creation.next_release_check(s), pool_selection.select_next_pool(s)[1])
    # First the table: a generation begins with it.
    decision = _push_addresses(s, decision)
    named = job_service.name_pods(s)
    return decision.with_actions(named) if named is not None else decision


def _has_nothing_new(s: PlanContext, decision: Decision) -> bool:
    """Return whether a job restarts as before, for the reason that is on record: limits and charges go by it."""
    known = s.open is not None and decision.reason == s.open.reason
    return known and decision.phase is Phase.RESTARTING is s.phase and not decision.stalled


def _determine_phase(s: PlanContext, account: RestartBudget) -> Decision:
    """Return the phase of a job that goes on."""
    if _are_ranks_running(s):
        known = "all pods run; nobody tells of their ranks" if s.degraded else "all ranks are started"
        return Decision(Phase.RUNNING, Reason.RUNNING, known)
    if s.phase in RUN_PHASES and not _is_queued(s):
        reason, message = _explain_restart(s, account)
        restarting = Decision(Phase.RESTARTING, reason, message, stalled=reason in gang.STALLING_REASONS)
        says_running = s.leader is not None and s.leader.phase == "running"  # again and again, it wakes nobody
        return restarting.requeue_at(s.now + _CONFIRM_SECONDS if says_running else None)
    if s.open is not None and s.phase is Phase.PENDING and not s.live:
        return Decision(
            Phase.PENDING,
            parse_reason(s.open.reason),
            _open_phase_message(s),
            stalled=s.open.reason in gang.STALLING_REASONS,
        )
    if s.all_bound or s.phase is Phase.STARTING:
        if text := timeouts.describe_container_wait(s):
            return Decision(Phase.STARTING, Reason.CONTAINER_WAITING, text)
        return Decision(Phase.STARTING, Reason.SCHEDULED, "all pods have a node; ranks are being started")
    if s.open is not None and s.open.reason in gang.BLOCKED_REASONS:
        return Decision(
            Phase.PENDING,
            parse_reason(s.open.reason),
            _open_phase_message(s),
            stalled=s.open.reason in gang.STALLING_REASONS,
        )
    text, again = timeouts.describe_capacity_wait(s)
    text = text or Reason.WAITING_FOR_CAPACITY.meaning
    return Decision(Phase.SCHEDULING, Reason.WAITING_FOR_CAPACITY, text).requeue_at(again)


def _is_queued(s: PlanContext) -> bool:
    """Return whether a job that restarts has no node left, and a queue keeps its pods from the scheduler. It is no
    longer recovering then: it may wait for days, which `timeouts.runtime` does not count."""
    waits = s.phase is Phase.RESTARTING and any(pod.gated for pod in s.live)
    return waits and not any(pod.scheduled for pod in s.current.values())


def _are_ranks_running(s: PlanContext) -> bool:
    if s.plain:
        pods = s.current.values()
        up = [p for p in pods if (p.running and p.live) or pod_replacement.has_succeeded(p)]
        return len(up) == s.wanted and not any(restart_budget.is_set_charged(s.status.restarts, p) for p in pods)
    if len(s.live) < s.wanted:
        return False
    leader = s.leader
    if leader is None:
        # A short silence proves nothing, neither good nor bad.
        return s.ready == s.wanted if s.degraded else s.phase is Phase.RUNNING
    if leader.phase != "running":
        return leader.phase == "ended" and s.phase is Phase.RUNNING
    if s.phase is not Phase.RESTARTING or leader.epoch != s.status.epoch:
        return True
    # The generation that broke may still be what an older answer tells of.
    since = s.since({Phase.RESTARTING})
    if leader.generation > s.status.generation or (leader.running_since or 0.0) >= since:
        return True
    # To an operator that has just started all answers are new: what it was told of the break, it finds in the status. A
    # leader that is silent about one for as long as it may take to notice it has none.
    charged = restart_budget.is_restart_charged(s, s.status.restarts)
    is_sure = (leader.answered_at or 0.0) >= since + restart_budget.SILENT_FATE_WAIT_SECONDS
    if leader.running_since is None and (charged or is_sure):
        return True
    # Nor has it broken where its pods only seemed lost, and are still the same: a Node that was removed and came back.
    replaced = any(restart_budget.is_replacement(s, pod) for pod in s.live)
    return not replaced and (leader.answered_at or 0.0) > since


def _explain_restart(s: PlanContext, account: RestartBudget) -> tuple[Reason, str]:
    if (kept := pod_replacement.describe_kept_pod(s)) is not None:
        pod, message = kept
        return pod_replacement.explain_pod_loss(s, pod), message
    lost = next(iter(pod_replacement.list_lost_pods(s)), None)
    absent = lost is not None or bool(pod_replacement.list_missing_indices(s))
    if absent and (left := node_notices.explain_leave(s, lost)) is not None:
        return left
    if account.last_failure is not None:
        return parse_reason(account.last_failure.reason), account.last_failure.message
    # The leader may tell of a lost pod before the API server does, which alone knows why.
    explained = lost is not None and pod_replacement.explain_pod_loss(s, lost) in pod_replacement.LOSS_REASONS
    if s.phase is Phase.RESTARTING and s.open is not None and not (explained and s.open.reason == Reason.RESTARTING):
        return parse_reason(s.open.reason), _open_phase_message(s)
    if absent:
        return pod_replacement.explain_pod_loss(s, lost), "a pod was lost; its replacement is being made"
    return Reason.RESTARTING, Reason.RESTARTING.meaning


def _open_phase_message(s: PlanContext) -> str:
    """Return the message that goes with the open phase: Ready carries it, unless it told of a container that waited."""
    if s.open is None or not s.status.conditions:
        return ""
    ready = s.status.conditions[0]
    waited = ready.reason == Reason.CONTAINER_WAITING and s.open.reason != ready.reason
    return parse_reason(s.open.reason).meaning if waited else ready.message


def _fail_job(s: PlanContext, reason: Reason, message: str) -> Decision:
    live = [p for p in s.observed.ours if p.live]
    return Decision(Phase.FAILED, reason, message).with_actions(pod_replacement.make_deletion(live, reason))


def _push_addresses(s: PlanContext, decision: Decision) -> Decision:
    """Push the address table once it is complete: a generation needs every pod, a part of the table helps nobody."""
    if s.plain or s.head is None or not s.head.running or s.wanted == 1:
        return decision
    if s.leader is not None and not s.leader.missing:
        return decision
    if len(s.live) < s.wanted or not all(p.ip for p in s.live):
        return decision
    port = find_agent_port(s.observed.frozen, s.observed.settings)
    return decision.with_actions(PushPeers(s.head.epoch, {p.index: p.format_address(port) for p in s.live}))


def _is_head_dead(s: PlanContext) -> bool:
    node = s.observed.nodes.get(s.head.node) if s.head is not None and s.head.node else None
    return node is not None and node.dead_since is not None


def _make_poll(s: PlanContext, restarts: Restarts, phase: Phase) -> LeaderPoll | None:
    head = s.head
    # Also while it stops for a suspension, or has succeeded: a leader that nobody renews may not publish its last
    # checkpoint.
    if phase is Phase.FAILED or s.plain or head is None or not head.running or not head.ip:
        return None
    if head.gone_since is not None:
        return None  # should it still run somewhere, it shall not go on in our name
    last = restarts.last
    allowance = 0 if phase is Phase.STOPPING else restart_budget.count_remaining_restarts(s, restarts)
    address = head.format_address(find_agent_port(s.observed.frozen, s.observed.settings))
    charged = last.id if last else ""
    return LeaderPoll(address, head.uid, head.epoch, head.template, charged, allowance, head.token_secret, s.wanted)
