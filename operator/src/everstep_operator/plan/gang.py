"""All or nothing: when a set that is only partly placed gives its nodes back, and when it tries again.

The scheduler binds pods one by one, so two jobs can each hold half of what both need. Gangs that share a pool are
ordered: first those that today's nodes could hold (node_capacity.py), then those that they could not, each by age
(creation time, then UID). "Older" and "younger" below are by this order. And:

- the oldest never gives back anything while another gang wants the pool;
- of the others, a gang that has stalled gives back once no younger gang holds nodes, or at once if the nodes that all
  waiting gangs hold together would not be enough for it even when they were dealt out again, oldest first;
- after that it waits until every older gang of the pool has its nodes, or for a back-off.

So what the oldest holds only grows, every other holder ends up released, and their nodes can go nowhere but to the
oldest or to a gang that is then complete and will finish: no deadlock and no livelock (simulated in test_gang.py). The
second rule's shortcut lets a hundred stalled jobs give back together instead of one after the other. It counts
pods, not GPUs; a wrong guess costs a job its place, never the proof.

A gang that is too large for today's nodes may become possible: nodes are added, by people or because its pods wait. So
it is tried again after each back-off, and takes its place by age again once the nodes are there; until then it gives
way to every gang that can run. One that is possible never gives way to a younger one: the number of times that it is
overtaken by giving back while it is the oldest is 0, and nothing has to be counted.

Gangs of one namespace that its quota blocks are ordered in the same way, and what they hold are pods, with a node or
without. One that wants more than the quota's limit, as far as the API server has told it (quota.py), counts as too
large. But how much is left for the gangs nobody tells: the oldest may want more. So it gives back too, as late as a
gang that is alone, and leaves the quota to the others for a while.

A gang without a node, of which a queue (Kueue) keeps pods from the scheduler, wants none yet: it counts for those alone
of which the same or another queue keeps pods, too. One with nodes gives them back as late as a gang that is alone, also
if it is the oldest: its queue may never have room for all of it, and meanwhile has none for the others.

A gang that anything else than nodes blocks (a quota, a webhook) does not hold nodes that others wait for, however old
it is: it gives them back as soon as what younger gangs have given back would have helped it (if it has run, as late as
a gang that is alone). It keeps its age: once it is blocked no more, it is the oldest again. And nobody waits for it:
nodes are not what it wants.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import ConditionType, Phase
from everstep_operator.plan.observation import GangView, PodView
from everstep_operator.plan.quota import admitted_at_most

STALL_SECONDS = 30.0  # seconds without a new bound pod before a younger gang counts as stalled
STALL_SECONDS_RECOVERING = (
    300.0  # survivors hold images, data and page cache: starting over costs far more than waiting
)
PATIENCE_BLOCKED = 90.0  # of the oldest: a younger gang gives back after 30 s, and 30 s later a quota is tried again
STALL_SECONDS_ALONE = 600.0  # nobody of ours is waiting for these nodes; as long as node autoscalers take to give up
UNTRIED_SECONDS = 600.0  # for so long a gang whose pods the scheduler has not tried yet is not stalled
SCALE_UP_SECONDS = 600.0  # for so long after an autoscaler promised a node, a gang is not stalled
BACKOFF_SECONDS = 300.0
BACKOFF_SECONDS_ALONE = 60.0
BACKOFF_JITTER_SECONDS = 60.0
# A quota ends by waiting; the others need somebody to act.
STALLING_REASONS = frozenset({Reason.NAME_CONFLICT.value, Reason.NOT_PERMITTED.value, Reason.ADMISSION_REJECTED.value})
BLOCKED_REASONS = STALLING_REASONS | {Reason.QUOTA_EXCEEDED.value}
_WAITING = frozenset({Reason.GANG_RELEASED.value, Reason.QUOTA_EXCEEDED.value})  # phase Pending
RECHECK_SECONDS = 300.0  # nodes come and go without an event for the job that holds others up


@dataclass(frozen=True, slots=True)
class GangVerdict:
    """`release`: give back what is held. `retry_at`: ask again then at the latest (None: when something changes)."""

    release: bool = False
    retry_at: float | None = None


def gang_precedence(gang: GangView) -> tuple[bool, float, str]:
    """Return the key by which gangs are ordered for their nodes."""
    return not gang.possible, gang.created, gang.uid


def list_rivals(me: GangView, gangs: Iterable[GangView]) -> list[GangView]:
    """Return other gangs without their full set that want a pool of mine, or my quota. No pool means the whole
    cluster."""

    def want_the_same(other: GangView) -> bool:
        if other.quota:
            return other.quota == me.quota
        if other.gated and not other.scheduled and not me.gated:
            return False  # it wants no node yet, and its queue may keep it for days
        return not other.pools or not me.pools or bool(other.pools & me.pools)

    return [g for g in gangs if g.uid != me.uid and g.scheduled < g.wanted and want_the_same(g)]


def judge_hold(
    me: GangView, gangs: Iterable[GangView], *, grew_at: float, scale_up_at: float | None, now: float
) -> GangVerdict:
    """Decide whether a partly placed gang goes on holding its nodes.

    Args:
        me: The gang.
        gangs: All waiting gangs.
        grew_at: When it last got a node (Unix seconds).
        scale_up_at: When an autoscaler last said that it makes a node for it, if it ever has.
        now: Unix seconds.
    """
    if me.scheduled == 0 or me.scheduled >= me.wanted:
        return GangVerdict()  # pods without a node cost nothing and keep their place in the scheduler's queue
    others = list_rivals(me, gangs)
    if others and gang_precedence(me) < min(map(gang_precedence, others)):
        return _hold_as_oldest(me, others, grew_at, now)
    patience = STALL_SECONDS_RECOVERING if me.recovering else STALL_SECONDS
    since = grew_at
    if scale_up_at is not None:
        since = max(since, scale_up_at + SCALE_UP_SECONDS - patience)
    if not others:
        return _release_after(since + STALL_SECONDS_ALONE, now)
    if _would_fit(me, others):
        younger = [g for g in others if gang_precedence(g) > gang_precedence(me)]
        if any(g.scheduled for g in younger):
            return GangVerdict()  # theirs first; their release is an event that brings us back here
        # What a younger one has just given back needs the time to be bound.
        since = max([since, *(g.released_at for g in younger if g.released_at is not None)])
    return _release_after(since + patience, now)


def _hold_as_oldest(me: GangView, others: Sequence[GangView], grew_at: float, now: float) -> GangVerdict:
    if not me.blocked and not me.gated:
        return GangVerdict(retry_at=now + RECHECK_SECONDS)
    if not me.blocked:
        return _release_after(grew_at + STALL_SECONDS_ALONE, now)
    wanted = not me.recovering and not all(g.quota for g in others)  # nodes are
    patience = PATIENCE_BLOCKED if wanted else STALL_SECONDS_ALONE
    since = max([grew_at, *(g.released_at for g in others if g.released_at is not None)])
    # What others give back again and again may be of no use to this one.
    return _release_after(min(since + patience, grew_at + STALL_SECONDS_ALONE), now)


def judge_retry(me: GangView, gangs: Iterable[GangView], *, now: float) -> GangVerdict:
    """Decide whether a gang that gave its nodes back (at `me.released_at`) may create its pods again: yes if the
    verdict has neither `release` nor `retry_at`."""
    if me.released_at is None:
        return GangVerdict()
    older = [g for g in list_rivals(me, gangs) if gang_precedence(g) < gang_precedence(me)]
    if not older:
        # Those who made it give way may have just got their nodes; whoever was alone lets others have a go first.
        alone = me.released_at + (BACKOFF_SECONDS_ALONE if me.blocked or not list_rivals(me, gangs) else 0.0)
        return GangVerdict(retry_at=alone) if now < alone else GangVerdict()
    until = me.released_at + BACKOFF_SECONDS + _compute_jitter(me.uid)
    return GangVerdict(retry_at=until) if now < until else GangVerdict()


def heeds_rivals(me: GangView) -> bool:
    """Tell whether what a gang does next may follow from its rivals: it holds something, or has given it back.

    The others need not be woken when a rival begins or ends, and in a long queue nearly all are others.
    """
    return me.scheduled > 0 or me.released_at is not None


def _would_fit(me: GangView, others: Sequence[GangView]) -> bool:
    """Return whether the nodes that all gangs hold now would be enough for this one, dealt out oldest first."""
    held = me.scheduled + sum(g.scheduled for g in others)
    return me.wanted + sum(g.wanted for g in others if gang_precedence(g) < gang_precedence(me)) <= held


def _release_after(at: float, now: float) -> GangVerdict:
    return GangVerdict(release=True) if now >= at else GangVerdict(retry_at=at)


def _compute_jitter(uid: str) -> float:
    """Return a delay in seconds, so that gangs released together do not come back together. It is not random: the same
    inputs make the same plan."""
    return zlib.crc32(uid.encode()) % 1024 / 1024 * BACKOFF_JITTER_SECONDS


def count_bound_pods(pods: Iterable[PodView]) -> int:
    return sum(1 for p in pods if p.live and p.scheduled)


def make_gang_view(job: TrainingJob, pods: Iterable[PodView], places: int | None = None) -> GangView:
    """Return a job as others see it in the queue. `is_waiting` tells whether it is in it at all."""
    status, meta = job.status, job.metadata
    template = status.template.epoch if status.template else 0
    released = [t.start.timestamp() for t in status.transitions if t.reason == Reason.GANG_RELEASED]
    blocked, quota = blocked_by(job), ""
    if blocked == Reason.QUOTA_EXCEEDED:
        quota = meta.namespace or ""
        ready = status.condition(ConditionType.READY)
        admitted = admitted_at_most(ready.message) if ready is not None else None
        places = min((count for count in (places, admitted) if count is not None), default=None)
    mine = [p for p in pods if p.owner == meta.uid and p.template == template]
    return GangView(
        key=f"{meta.namespace}/{meta.name}",
        uid=meta.uid,
        created=meta.creation_timestamp.timestamp() if meta.creation_timestamp else 0.0,
        pools=frozenset(status.template.pools if status.template else ()),
        wanted=job.spec.num_nodes,
        scheduled=sum(p.live for p in mine) if quota else count_bound_pods(mine),
        released_at=max(released, default=None),
        recovering=status.phase is Phase.RESTARTING,
        places=places,
        blocked=blocked is not None,
        quota=quota,
        gated=any(p.gated and p.live for p in mine),
    )


def blocked_by(job: TrainingJob) -> str | None:
    """Return the reason, other than a lack of nodes, for which a set is not complete, or was not when it gave its pods
    back; None: there is none."""
    phase, reasons = job.status.phase, [t.reason for t in job.status.transitions[-2:]]
    if phase is Phase.PENDING and reasons[-1:] == [Reason.GANG_RELEASED]:
        del reasons[-1]
    return (
        reasons[-1]
        if phase in (Phase.PENDING, Phase.RESTARTING) and reasons and reasons[-1] in BLOCKED_REASONS
        else None
    )


def is_waiting(job: TrainingJob) -> bool:
    """Return whether the job is a gang that wants nodes, or a quota, now, and not one that waits for something else: a
    pool, a human."""
    status = job.status
    if job.spec.suspend or not job.managed_here or job.metadata.deletion_timestamp is not None:
        return False
    if blocked_by(job) in STALLING_REASONS:
        return False
    if status.phase is Phase.PENDING:
        return bool(status.transitions) and status.transitions[-1].reason in _WAITING
    return status.phase in (Phase.SCHEDULING, Phase.STARTING, Phase.RESTARTING)
