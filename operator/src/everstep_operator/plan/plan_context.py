"""One job at one moment, sorted for the policies: the observation, the clock, and what follows from both at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

from everstep_operator.api.job import TrainingJob, TrainingJobSpec
from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase, TemplateStatus, TrainingJobStatus, Transition
from everstep_operator.plan.leader_view import LeaderView
from everstep_operator.plan.observation import Observation, PodView
from everstep_operator.plan.pod_manifest import make_pod_name

# Without an answer of the leader for so long, phases come from the pods alone. Longer than a poll that times out.
DEGRADED_AFTER_SECONDS = 15.0
FORMING_PHASES = frozenset({Phase.PENDING, Phase.SCHEDULING, Phase.STARTING, Phase.SUSPENDED})
RUN_PHASES = frozenset({Phase.RUNNING, Phase.RESTARTING})
RESOLVED_ANEW = frozenset({Reason.CREATED.value, Reason.RESUMED.value, Reason.NEXT_POOL.value})


@dataclass(frozen=True)
class PlanContext:
    """All policies take one of these. Nothing in it is ever changed."""

    observed: Observation
    now: float

    @property
    def job(self) -> TrainingJob:
        return self.observed.job

    @cached_property
    def spec(self) -> TrainingJobSpec:
        return self.observed.job.spec

    @cached_property
    def status(self) -> TrainingJobStatus:
        """Return the status as it was observed: the planner's only memory.

        A charge of an epoch that was never given out is left out: older versions believed pods' labels and leaders'
        ids, and it would be newer than whatever ends from now on. An epoch that was given out is there, whatever
        somebody has made of the status: it shall not be given out twice.
        """
        status = self.observed.job.status
        newest = self.observed.newest_epoch
        credible = [charge for charge in status.restarts.charges if charge.token[0] <= newest]
        if len(credible) < len(status.restarts.charges):
            status = status.model_copy(update={"restarts": status.restarts.model_copy(update={"charges": credible})})
        return status if status.epoch == newest else status.model_copy(update={"epoch": newest})

    @cached_property
    def phase(self) -> Phase:
        return self.status.phase or Phase.PENDING

    @cached_property
    def wanted(self) -> int:
        return self.spec.num_nodes

    @cached_property
    def template(self) -> TemplateStatus | None:
        return self.status.template

    @cached_property
    def plain(self) -> bool:
        return self.template is not None and self.template.plain

    @cached_property
    def current(self) -> dict[int, PodView]:
        """Return the pods of the current template by index, whatever their state. The name lets one object exist per
        index."""
        epoch, job, wanted = self.template.epoch if self.template else 0, self.job.metadata.name, self.wanted
        return {
            p.index: p
            for p in self.observed.ours
            if p.template == epoch and 0 <= p.index < wanted and p.name == make_pod_name(job, p.index)
        }

    @cached_property
    def stale(self) -> tuple[PodView, ...]:
        """Return the job's own pods that belong to no index of the current template."""
        current = {p.uid for p in self.current.values()}
        return tuple(p for p in self.observed.ours if p.uid not in current)

    @cached_property
    def live(self) -> tuple[PodView, ...]:
        return tuple(p for p in self.current.values() if p.live)

    @cached_property
    def all_bound(self) -> bool:
        return len(self.live) == self.wanted and all(p.scheduled for p in self.live)

    @cached_property
    def ready(self) -> int:
        return sum(1 for p in self.live if p.running)

    @property
    def head(self) -> PodView | None:
        """Return pod 0, or None."""
        return self.current.get(0)

    @cached_property
    def leader(self) -> LeaderView | None:
        """Return the leader's last answer, if it is the present pod 0's and still to be believed."""
        view, head = self.observed.leader, self.head
        if self.plain or view is None or view.answered_at is None or head is None or view.epoch != head.epoch:
            return None
        fresh = view.reachable or self.now - view.answered_at < DEGRADED_AFTER_SECONDS
        return view if fresh or view.outcome is not None else None

    @cached_property
    def degraded_at(self) -> float | None:
        """Return when the silence of a leader that should answer becomes, or became, long enough to go without it."""
        head = self.head
        if self.plain or head is None or not head.live or not head.running or self.leader is not None:
            return None
        view = self.observed.leader
        if view is None:
            # Nobody has asked it yet: an operator that has just started knows of no silence.
            return self.now + DEGRADED_AFTER_SECONDS
        heard = view.answered_at if view.epoch == head.epoch else None
        return max(heard or 0.0, view.asked_since) + DEGRADED_AFTER_SECONDS

    @property
    def degraded(self) -> bool:
        return self.degraded_at is not None and self.now >= self.degraded_at

    @property
    def open(self) -> Transition | None:
        """Return the phase the job is in, with its reason and start."""
        return self.status.transitions[-1] if self.status.transitions else None

    def since(self, phases: Iterable[Phase]) -> float:
        """Return the start of the present uninterrupted stretch in any of `phases`; now, if the job is in none of
        them."""
        among, start = frozenset(phases), self.now
        for transition in reversed(self.status.transitions):
            if transition.phase not in among:
                break
            start = transition.start.timestamp()
        return start

    @property
    def created(self) -> float:
        at = self.job.metadata.creation_timestamp
        return at.timestamp() if at is not None else self.now

    @property
    def has_run(self) -> bool:
        """Return whether ranks of this job have run at some time, so that it is bound to what it was resolved to."""
        status = self.status
        return self.phase in RUN_PHASES or status.timings.running > 0 or status.restarts.total > 0

    @property
    def may_become_plain(self) -> bool:
        """Return whether an image is run without the agent if the agent cannot run in it. Where ranks of this template
        have run it can: a queue that took their nodes back, or a set that was given back, makes them form once more."""
        if self.phase not in FORMING_PHASES:
            return False
        last = next((t for t in reversed(self.status.transitions) if t.phase in RUN_PHASES or _is_resolved(t)), None)
        return last is None or _is_resolved(last)

    @property
    def is_first_creation(self) -> bool:
        """Return whether the API server has never accepted a pod of this job."""
        if self.has_run or self.observed.ours or (self.template is not None and self.template.epoch > 1):
            return False
        if self.status.timings.starting > 0 or any(_proves_pods(t) for t in self.status.transitions):
            return False
        # Attempts that were cut short have raised the epoch. A template is stored once its pod 0 was accepted.
        return self.status.epoch <= 1 or self.observed.frozen is None

    @property
    def pool(self) -> TrainingPool | None:
        return self.observed.pools.get(self.template.pool) if self.template else None

    @property
    def on_demand_pool(self) -> TrainingPool | None:
        """Return the pool of the first pods, where it is another one."""
        return self.observed.pools.get(self.template.on_demand_pool) if self.template else None

    @property
    def num_on_demand(self) -> int:
        """Return how many of the first pods are in a pool of their own."""
        return self.spec.min_on_demand if self.template is not None and self.template.on_demand_pool else 0


def _is_resolved(transition: Transition) -> bool:
    """Tell whether the set was resolved from a new template when this began."""
    return transition.reason in RESOLVED_ANEW


def _proves_pods(transition: Transition) -> bool:
    """Tell whether the API server had accepted pods of the job when this began. A quota is judged after all else."""
    return transition.phase is Phase.STARTING or transition.reason in (Reason.GANG_RELEASED, Reason.QUOTA_EXCEEDED)


def to_utc(seconds: float) -> datetime:
    """Return a time for a status: milliseconds are enough, and what is read back is what was written."""
    return datetime.fromtimestamp(round(seconds, 3), UTC)
