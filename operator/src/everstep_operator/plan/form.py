"""Creates the set of pods: a new template, a first set, a released set that tries again, replacements for lost pods."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace as replace_fields

from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase, TemplateStatus
from everstep_operator.plan import gang, replace, restart, template
from everstep_operator.plan.actions import (
    Action,
    CreatePods,
    DeletePods,
    DeleteStale,
    DryRun,
    EnsureAgent,
    EnsureSecret,
    EnsureService,
    EnsureTemplate,
    Plan,
)
from everstep_operator.plan.decision import Decision
from everstep_operator.plan.keys import find_key
from everstep_operator.plan.observed import Frozen, GangView, Observed, PodView
from everstep_operator.plan.pods import pod_body, template_name
from everstep_operator.plan.situation import HAS_RUN, Situation
from everstep_operator.plan.template import Refused

RETRY_BLOCKED = 30.0


def new_template(
    s: Situation,
    pool: TrainingPool | None,
    *,
    plain: bool,
    reason: Reason,
    message: str,
    plain_reason: tuple[Reason, str] | None = None,
) -> Decision:
    """Resolve the whole set anew. Its pods are made once every pod of an older template is gone."""
    epoch = s.status.epoch + 1
    resolved = template.resolve(s.job, epoch=epoch, pool=pool, plain=plain, settings=s.observed.settings)
    if isinstance(resolved, Refused):
        return Decision(Phase.FAILED, resolved.reason, resolved.message).do(
            replace.refs(s.observed.ours, resolved.reason)
        )
    name = pool.metadata.name if pool else ""
    chosen = TemplateStatus(epoch=epoch, pool=name, plain=plain, spec_hash=s.spec.pods_hash())
    base = Decision(
        Phase.PENDING, reason, message, epoch=epoch, generation=0, template=chosen, plain_reason=plain_reason
    )
    if s.observed.ours:
        return base.do(replace.refs(s.observed.ours, reason))
    made = base.but(phase=Phase.SCHEDULING).do(*_make(s, resolved, range(s.wanted), epoch))
    return made.do(DeleteStale(epoch)) if s.template is not None else made


def fill(s: Situation, decision: Decision) -> Decision:
    """Create the indices that are missing, unless something is to be waited for. Pod 0 raises the epoch."""
    if s.stale or any(
        s.plain and restart.dead_set(decision.restarts or s.status.restarts, p) for p in s.current.values()
    ):
        return decision
    indices = replace.missing(s)
    if not indices or s.template is None:
        return decision
    if (until := _not_before(s)) is not None:
        return decision.look_again(until)
    frozen = s.observed.frozen
    if frozen is None or frozen.epoch != s.template.epoch:
        if s.template.pool and s.pool is None:
            # Without it nobody knows where its pods belong: they would be made for any node.
            message = (
                f"there is no TrainingPool {s.template.pool!r}, and the template that was made for it is gone: missing "
                "pods are made when it is there again"
            )
            waiting = decision.but(reason=Reason.POOL_NOT_FOUND, message=message, stalled=True)
            return waiting.look_again(s.now + RETRY_BLOCKED)
        made = _resolve_again(s, s.template.epoch)
        if isinstance(made, Refused) and s.is_first_creation:
            return decision.but(phase=Phase.FAILED, reason=made.reason, message=made.message)
        if isinstance(made, Refused):
            # The template's ConfigMap was deleted, or its signature does not hold, and the operator's configuration
            # allows less than it did.
            waiting = decision.but(reason=made.reason, message=made.message, stalled=True)
            return waiting.look_again(s.now + RETRY_BLOCKED)
        frozen = made
    epoch = s.status.epoch
    if 0 in indices:
        # Even if the last epoch's pod 0 was never made: nobody can know that it was not, and ran.
        epoch += 1
        decision = decision.but(epoch=epoch, generation=0)
    return decision.do(*_make(s, frozen, indices, epoch))


def creates(decision: Decision) -> bool:
    return any(isinstance(a, CreatePods) for a in decision.actions)


def release(s: Situation) -> Decision | None:
    """Give a partly placed set back if the gang policy says so, and wait for another try; return None if neither
    applies."""
    if _released(s):
        blocked = gang.blocked_by(s.job) is not None  # then the message tells by what
        said = s.status.conditions[0].message if blocked and s.status.conditions else _RELEASED
        waiting = Decision(Phase.PENDING, Reason.GANG_RELEASED, said)
        if s.current:
            return waiting.do(replace.refs(s.current.values(), Reason.GANG_RELEASED))
        until = _not_before(s)
        return None if until is None else waiting.look_again(until)
    verdict = _hold(s)
    if not verdict.release:
        return None
    message = f"{gang.bound(s.live)} of {s.wanted} pods had a node; {_RELEASED}"
    if _blocked(s):
        what = "fitted into the namespace's quota" if s.open and s.open.reason == Reason.QUOTA_EXCEEDED else "were made"
        why = s.status.conditions[0].message if s.status.conditions else ""
        message = f"{len(s.live)} of {s.wanted} pods {what}; {_GIVEN_BACK}: {why}"
    return Decision(Phase.PENDING, Reason.GANG_RELEASED, message, again=True).do(
        replace.refs(s.live, Reason.GANG_RELEASED)
    )


def asks_for_room(observed: Observed, made: Plan) -> PodView | None:
    """Return the pod to ask an autoscaler's word about before this plan is carried out, or None.

    The plan gives a set's nodes back, and is to be made again if a node is on its way (`Observed.scale_up_at`).
    """
    if not made.changed or not any(isinstance(a, DeletePods) and a.why == Reason.GANG_RELEASED for a in made.actions):
        return None
    return next((pod for pod in observed.ours if pod.live and not pod.scheduled), None)


def hold_until(s: Situation) -> float | None:
    """Return when to ask again whether the set is to be given back."""
    return _hold(s).retry_at


_RELEASED = "the nodes were given back until the set can be complete"
_GIVEN_BACK = "they were given back until the set can be complete"


def _hold(s: Situation) -> gang.Verdict:
    waiting = [p for p in s.live if not p.scheduled]
    if s.all_bound or not (waiting or _blocked(s)):
        return gang.Verdict()  # what lacks is an object that still terminates; nodes of ours would not help it
    grew_at = max((p.scheduled_at or 0.0 for p in s.live if p.scheduled), default=0.0)
    # Pods that came later than the last bound one have not had their chance yet.
    grew_at = max([grew_at, *(p.created for p in waiting)])
    return gang.hold(_me(s), s.observed.gangs, grew_at=grew_at, scale_up_at=s.observed.scale_up_at, now=s.now)


def _me(s: Situation) -> GangView:
    return gang.view(s.job, s.observed.pods, s.observed.places)


def _not_before(s: Situation) -> float | None:
    """Return when the missing pods may be created; None: now."""
    if s.open is not None and _blocked(s) and s.now < s.open.start.timestamp() + RETRY_BLOCKED:
        return s.open.start.timestamp() + RETRY_BLOCKED
    if _released(s):
        return gang.may_try(_me(s), s.observed.gangs, now=s.now).retry_at
    return None


def _blocked(s: Situation) -> bool:
    return s.open is not None and s.open.reason in gang.BLOCKED


def _released(s: Situation) -> bool:
    return s.phase is Phase.PENDING and s.open is not None and s.open.reason == Reason.GANG_RELEASED


def _resolve_again(s: Situation, epoch: int) -> Frozen | Refused:
    """Resolve a lost template by the key of the pods that it once gave: the new ones must share their token."""
    settings, meta = s.observed.settings, s.job.metadata
    mounted = (pod.token_secret for pod in s.current.values())
    settings = replace_fields(
        settings, operator_key=find_key(mounted, meta.name, meta.uid, epoch, settings.operator_keys)
    )
    return template.resolve(s.job, epoch=epoch, pool=s.pool, plain=s.plain, settings=settings)


def _make(s: Situation, frozen: Frozen, indices: Iterable[int], epoch: int) -> list[Action]:
    chosen = tuple(indices)
    job, settings, t = s.job, s.observed.settings, frozen.epoch
    actions: list[Action] = []
    if len(chosen) == s.wanted and s.phase not in HAS_RUN:
        # Before anything is made from it: a refused template leaves nothing behind.
        actions.append(DryRun(pod_body(frozen, 0, epoch)))
    if s.wanted > 1:
        actions.append(EnsureService(job.metadata.name, template.service(job, settings)))
    name = template_name(job.metadata.name, t)
    if not frozen.job.get("plain"):
        # By the template's name too: nothing else is mounted by the pods that come of it.
        token = template.secret_of(frozen)
        actions.append(EnsureSecret(token, t, template.secret(job, t, token)))
        # By the template's name, not today's: a job that began under another version goes on with that agent.
        actions.append(EnsureAgent(_agent_of(frozen), str(frozen.job.get("agentDigest") or "")))
    uid = job.metadata.uid
    key = find_key((template.secret_of(frozen),), job.metadata.name, uid, t, settings.operator_keys)
    actions.append(EnsureTemplate(name, t, template.config_map(job, frozen, key)))
    actions.append(CreatePods(chosen, epoch, frozen, _running_leader(s, chosen, epoch)))
    return actions


def _running_leader(s: Situation, indices: Iterable[int], epoch: int) -> str:
    """Return the address where these pods can announce themselves: the kubelet reports a new pod's address about a
    second late."""
    head = s.head
    if s.plain or head is None or 0 in indices or not head.running or not head.live or head.epoch != epoch:
        return ""
    return f"{head.ip}:{s.observed.settings.agent_port}" if head.ip else ""


def _agent_of(frozen: Frozen) -> str:
    volumes = frozen.pod["spec"].get("volumes") or ()
    return next((str(v["configMap"]["name"]) for v in volumes if v["name"] == "everstep-agent"), "")
