"""Creates the set of pods: a new template, a first set, a released set that tries again, replacements for lost pods."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace as replace_fields

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase, TemplateStatus
from everstep_operator.plan import (
    gang,
    job_service,
    node_notices,
    pod_replacement,
    restart_budget,
    start_failures,
    template,
)
from everstep_operator.plan.actions import (
    Action,
    CreatePods,
    DeletePods,
    DeleteStaleObjects,
    DryRun,
    EnsureAgent,
    EnsureSecret,
    EnsureService,
    EnsureTemplate,
    JobPlan,
)
from everstep_operator.plan.agent_config import find_agent_port
from everstep_operator.plan.agent_volume import find_agent_config_map
from everstep_operator.plan.decision import Decision
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.mixed_pools import resolve_for_pools
from everstep_operator.plan.observation import GangView, Observation, PodView
from everstep_operator.plan.operator_keys import find_key
from everstep_operator.plan.plan_context import RUN_PHASES, PlanContext
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.pool_selection import PoolSelection
from everstep_operator.plan.template import RejectedTemplate

BLOCKED_RETRY_SECONDS = 30.0
# Admission's words: ServiceAccount and RuntimeClass, Priority, ServiceAccount (its lookup fails), ResourceQuota (only a
# namespace with a quota for it may use a resource or a class), and a ValidatingAdmissionPolicy without its parameters.
_UNCONFIGURED = r"denied request: failed to configure "
_MISSING = re.compile(
    rf"not found|no PriorityClass with name|error looking up service account|insufficient quota to |{_UNCONFIGURED}"
)
_POLICY_UNREADY = re.compile(_UNCONFIGURED)
MAX_AVOIDED = 64  # names of nodes that a pod excludes


def resolve_new_template(
    s: PlanContext,
    chosen_pools: PoolSelection,
    *,
    plain: bool,
    reason: Reason,
    message: str,
    plain_reason: tuple[Reason, str] | None = None,
) -> Decision:
    """Resolve the whole set anew. Its pods are made once every pod of an older template is gone."""
    epoch = s.status.epoch + 1
    pool, on_demand = chosen_pools.pool, chosen_pools.on_demand
    resolved = resolve_for_pools(
        s.job, epoch=epoch, pool=pool, on_demand=on_demand, plain=plain, settings=s.observed.settings
    )
    if isinstance(resolved, RejectedTemplate):
        return Decision(Phase.FAILED, resolved.reason, resolved.message).with_actions(
            pod_replacement.make_deletion(s.observed.ours, resolved.reason)
        )
    name, first = (each.metadata.name if each is not None else "" for each in (pool, on_demand))
    chosen = TemplateStatus(epoch=epoch, pool=name, on_demand_pool=first, plain=plain, spec_hash=s.spec.pods_hash())
    base = Decision(
        Phase.PENDING, reason, message, epoch=epoch, generation=0, template=chosen, plain_reason=plain_reason
    )
    if s.observed.ours:
        return base.with_actions(pod_replacement.make_deletion(s.observed.ours, reason))
    made = base.with_fields(phase=Phase.SCHEDULING).with_actions(
        *_make_creation_actions(s, resolved, range(s.wanted), epoch)
    )
    return made.with_actions(DeleteStaleObjects(epoch)) if s.template is not None else made


def create_missing_pods(s: PlanContext, decision: Decision) -> Decision:
    """Create the indices that are missing, unless something is to be waited for. Pod 0 raises the epoch."""
    if s.stale or any(
        s.plain and restart_budget.is_set_charged(decision.restarts or s.status.restarts, p) for p in s.current.values()
    ):
        return decision
    indices = pod_replacement.list_missing_indices(s)
    if not indices or s.template is None:
        return decision
    if (until := _earliest_creation(s)) is not None:
        return decision.requeue_at(until)
    frozen = s.observed.frozen
    if frozen is None or frozen.epoch != s.template.epoch:
        if s.job.unknown_fields or any(each is not None and each.unknown_fields for each in (s.pool, s.on_demand_pool)):
            waiting = decision.with_fields(
                reason=Reason.UNKNOWN_FIELDS, message=describe_unknown_fields(s), stalled=True
            )
            return waiting.requeue_at(s.now + BLOCKED_RETRY_SECONDS)
        if missing := next((name for name in s.template.pools if name not in s.observed.pools), None):
            # Without it nobody knows where its pods belong: they would be made for any node.
            message = (
                f"there is no TrainingPool {missing!r}, and the template that was resolved for it no "
                "longer exists: missing pods are created when the pool exists again"
            )
            waiting = decision.with_fields(reason=Reason.POOL_NOT_FOUND, message=message, stalled=True)
            return waiting.requeue_at(s.now + BLOCKED_RETRY_SECONDS)
        made = _resolve_again(s, s.template.epoch)
        if isinstance(made, RejectedTemplate) and s.is_first_creation:
            return decision.with_fields(phase=Phase.FAILED, reason=made.reason, message=made.message)
        if isinstance(made, RejectedTemplate):
            # The template's ConfigMap was deleted, or its signature does not hold, and the operator's configuration
            # allows less than it did.
            waiting = decision.with_fields(reason=made.reason, message=made.message, stalled=True)
            return waiting.requeue_at(s.now + BLOCKED_RETRY_SECONDS)
        frozen = made
    epoch = s.status.epoch
    if 0 in indices:
        # Even if the last epoch's pod 0 was never made: nobody can know that it was not, and ran.
        epoch += 1
        decision = decision.with_fields(epoch=epoch, generation=0)
    return decision.with_actions(*_make_creation_actions(s, frozen, indices, epoch))


def describe_unknown_fields(s: PlanContext) -> str:
    """Return a message about a job of which no template can be resolved, because nobody knows what it says."""
    fields = [*s.job.unknown_fields]
    for pool in (s.pool, s.on_demand_pool):
        if pool is not None and pool.unknown_fields:
            fields += [f"{name} of TrainingPool {pool.metadata.name!r}" for name in pool.unknown_fields]
    return f"{', '.join(fields)}: {Reason.UNKNOWN_FIELDS.meaning}"


def has_pod_creation(decision: Decision) -> bool:
    return any(isinstance(a, CreatePods) for a in decision.actions)


def release_pods(s: PlanContext) -> Decision | None:
    """Give a partly placed set back if the gang policy says so, and wait for another try; return None if neither
    applies."""
    if _is_released(s):
        blocked = gang.blocked_by(s.job) is not None  # then the message tells by what
        said = s.status.conditions[0].message if blocked and s.status.conditions else _RELEASED_MESSAGE
        waiting = Decision(Phase.PENDING, Reason.GANG_RELEASED, said)
        if s.current:
            return waiting.with_actions(pod_replacement.make_deletion(s.current.values(), Reason.GANG_RELEASED))
        until = _earliest_creation(s)
        return None if until is None else waiting.requeue_at(until)
    verdict = _judge_hold(s)
    if not verdict.release:
        return None
    message = f"{gang.count_bound_pods(s.live)} of {s.wanted} pods had a node; {_RELEASED_MESSAGE}"
    if _is_blocked(s):
        what = "fitted into the namespace's quota" if s.open and s.open.reason == Reason.QUOTA_EXCEEDED else "were made"
        why = s.status.conditions[0].message if s.status.conditions else ""
        message = f"{len(s.live)} of {s.wanted} pods {what}; {_GIVEN_BACK}: {why}"
    return Decision(Phase.PENDING, Reason.GANG_RELEASED, message, again=True).with_actions(
        pod_replacement.make_deletion(s.live, Reason.GANG_RELEASED)
    )


def find_pod_to_scale_up(observed: Observation, made: JobPlan) -> PodView | None:
    """Return the pod to ask an autoscaler's word about before this plan is carried out, or None.

    The plan gives a set's nodes back, and is to be made again if a node is on its way (`Observation.scale_up_at`).
    """
    if not made.changed or not any(isinstance(a, DeletePods) and a.why == Reason.GANG_RELEASED for a in made.actions):
        return None
    return next((pod for pod in observed.ours if pod.live and not pod.scheduled), None)


def next_release_check(s: PlanContext) -> float | None:
    """Return when to ask again whether the set is to be given back."""
    return _judge_hold(s).retry_at


_RELEASED_MESSAGE = "the nodes were given back until the set can be complete"
_GIVEN_BACK = "they were given back until the set can be complete"


def _judge_hold(s: PlanContext) -> gang.GangVerdict:
    waiting = [p for p in s.live if not p.scheduled]
    if s.all_bound or not (waiting or _is_blocked(s)):
        return gang.GangVerdict()  # what lacks is an object that still terminates; nodes of ours would not help it
    grew_at = max((p.scheduled_at or 0.0 for p in s.live if p.scheduled), default=0.0)
    # Pods that came later than the last bound one have not had their chance yet.
    grew_at = max([grew_at, *(p.created for p in waiting)])
    if any(not p.unschedulable for p in waiting) and not _is_blocked(s):
        # Nor have those to which the scheduler has not come, behind ten thousand others; unless it never does.
        grew_at = max(grew_at, min(s.now, grew_at + gang.UNTRIED_SECONDS))
    return gang.judge_hold(
        _view_own_gang(s), s.observed.gangs, grew_at=grew_at, scale_up_at=s.observed.scale_up_at, now=s.now
    )


def _view_own_gang(s: PlanContext) -> GangView:
    return gang.make_gang_view(s.job, s.observed.pods, s.observed.places)


def is_something_missing(message: str) -> bool:
    """Tell whether admission has rejected a pod for something that it names and that is not there."""
    return _MISSING.search(message) is not None


def is_policy_unready(message: str) -> bool:
    """Tell whether a policy could not judge a pod: the object with its parameters is not there. It denies as if the pod
    were invalid."""
    return _POLICY_UNREADY.search(message) is not None


def compute_next_attempt(s: PlanContext, message: str, rejected_at: float) -> float:
    """Return when what was rejected is tried again. What a new job's pods name may be made with it, as the service
    account of a new namespace: it is waited for as long as it has been, at first a second.

    Args:
        s: The job.
        message: Says why it was rejected.
        rejected_at: When it was (Unix seconds).
    """
    if not (s.is_first_creation and is_something_missing(message)):
        return rejected_at + BLOCKED_RETRY_SECONDS
    return rejected_at + min(BLOCKED_RETRY_SECONDS, max(1.0, rejected_at - s.created))


def _earliest_creation(s: PlanContext) -> float | None:
    """Return when the missing pods may be created; None: now."""
    if s.open is not None and _is_blocked(s):
        said = s.status.conditions[0].message if s.status.conditions else ""
        at = compute_next_attempt(s, said, s.open.start.timestamp())
        if s.now < at:
            return at
    if _is_released(s):
        return gang.judge_retry(_view_own_gang(s), s.observed.gangs, now=s.now).retry_at
    return restart_budget.find_backoff_end(s)


def _is_blocked(s: PlanContext) -> bool:
    return s.open is not None and s.open.reason in gang.BLOCKED_REASONS


def _is_released(s: PlanContext) -> bool:
    return s.phase is Phase.PENDING and s.open is not None and s.open.reason == Reason.GANG_RELEASED


def _resolve_again(s: PlanContext, epoch: int) -> FrozenTemplate | RejectedTemplate:
    """Resolve a lost template by the key of the pods that it once gave: the new ones must share their token."""
    settings, meta = s.observed.settings, s.job.metadata
    mounted = (pod.token_secret for pod in s.current.values())
    settings = replace_fields(
        settings, operator_key=find_key(mounted, meta.name, meta.uid, epoch, settings.operator_keys)
    )
    return resolve_for_pools(
        s.job, epoch=epoch, pool=s.pool, on_demand=s.on_demand_pool, plain=s.plain, settings=settings
    )


def _make_creation_actions(s: PlanContext, frozen: FrozenTemplate, indices: Iterable[int], epoch: int) -> list[Action]:
    chosen = tuple(indices)
    job, settings, t = s.job, s.observed.settings, frozen.epoch
    actions: list[Action] = []
    if len(chosen) == s.wanted and s.phase not in RUN_PHASES:
        # Before anything is made from it: a refused template leaves nothing behind.
        actions.append(DryRun(build_pod(frozen, 0, epoch)))
        if frozen.on_demand is not None:
            actions.append(DryRun(build_pod(frozen, frozen.num_on_demand, epoch)))
    if s.wanted > 1:
        is_complete = s.phase in RUN_PHASES and len(chosen) < s.wanted
        service = job_service.build_service(job, settings, is_complete=is_complete)
        actions.append(EnsureService(job.metadata.name, service))
    name = template.config_map_name_of(frozen)
    if not frozen.job.get("plain"):
        # By the template's name too: nothing else is mounted by the pods that come of it.
        token = template.secret_name_of(frozen)
        actions.append(EnsureSecret(token, t, template.build_secret(job, t, token)))
        # By the template's name, not today's: a job that began under another version goes on with that agent.
        actions.append(EnsureAgent(find_agent_config_map(frozen.pod["spec"]), str(frozen.job.get("agentDigest") or "")))
    uid = job.metadata.uid
    key = find_key((template.secret_name_of(frozen),), job.metadata.name, uid, t, settings.operator_keys)
    actions.append(EnsureTemplate(name, t, template.build_config_map(job, frozen, key)))
    leader = _find_leader_address(s, frozen, chosen, epoch)
    leaving = sorted({*s.observed.silent_nodes, *node_notices.list_left_nodes(s)})
    bad = tuple(name for name in s.observed.avoided_nodes if name not in leaving)
    firm = bad if pod_replacement.is_choosy(s) else ()
    avoided = (*leaving, *firm)
    failed = start_failures.find_failed_node(s)
    shunned = tuple(name for name in dict.fromkeys((*bad, *([failed] if failed else []))) if name not in avoided)
    actions.append(CreatePods(chosen, epoch, frozen, leader, avoided[:MAX_AVOIDED], shunned[:MAX_AVOIDED]))
    return actions


def _find_leader_address(s: PlanContext, frozen: FrozenTemplate, indices: Iterable[int], epoch: int) -> str:
    """Return the address where these pods can announce themselves: the kubelet reports a new pod's address about a
    second late."""
    head = s.head
    if s.plain or head is None or 0 in indices or not head.running or not head.live or head.epoch != epoch:
        return ""
    return head.format_address(find_agent_port(frozen, s.observed.settings)) if head.ip else ""
