"""The status of a TrainingJob: what the operator reports about it. Only the operator writes it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, Strict

from everstep_operator.api.base import StatusModel
from everstep_operator.api.scalars import ListMap, Time, Whole

MAX_CHARGES = 64
MAX_TRANSITIONS = 32
MAX_LOG_LINES = 50
MAX_DISRUPTED_NODES = 64

Line = Annotated[str, Field(max_length=1024)]
ReasonWord = Annotated[str, Field(max_length=128, description="A CamelCase word of the table of reasons.")]
Message = Annotated[str, Field(max_length=4096)]
Count = Annotated[int, Field(ge=0), Whole]
Seconds = Annotated[float, Field(ge=0)]


class Phase(StrEnum):
    """The phase of a job in one word. Conditions carry the details."""

    PENDING = "Pending"
    SCHEDULING = "Scheduling"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    STOPPING = "Stopping"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        """Return whether the phase is final."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class Cause(StrEnum):
    """Names what pays for a restart: failures of the program and lost pods have a budget each, the others are free."""

    APPLICATION = "Application"
    INFRASTRUCTURE = "Infrastructure"
    PREEMPTION = "Preemption"
    IGNORED = "Ignored"


def _read_cause(value: Any) -> Any:
    """Return a cause that only a newer operator knows as one that no budget pays: its restart stays counted, and a job
    that an older operator takes over goes on."""
    return Cause.IGNORED.value if isinstance(value, str) and value not in frozenset(Cause) else value


def _read_tier(value: Any) -> Any:
    """Return None for a place that only a newer operator knows."""
    return value if value in get_args(Tier) or not isinstance(value, str) else None


KnownCause = Annotated[Cause, Strict(False), BeforeValidator(_read_cause)]
Tier = Literal["memory", "peer", "store"]


class ConditionType(StrEnum):
    """The conditions of a job. Reconciling and Stalled are kstatus' own."""

    READY = "Ready"
    COMPLETE = "Complete"
    FAILED = "Failed"
    SUSPENDED = "Suspended"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    PLAIN_MODE = "PlainMode"
    DEGRADED = "Degraded"
    NODES_HEALTHY = "NodesHealthy"
    CHECKPOINT_STALE = "CheckpointStale"
    CAPACITY_AVAILABLE = "CapacityAvailable"
    VOLUMES_SHARED = "VolumesShared"


class Condition(StatusModel):
    """One observation in the form of Kubernetes' metav1.Condition."""

    type: Annotated[ConditionType, Strict(False)]
    """Name of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: ReasonWord
    message: Message = ""
    """Details for people."""
    last_transition_time: Time
    """When `status` last changed."""
    observed_generation: Count = 0
    """The `metadata.generation` that the condition describes."""


class TemplateStatus(StatusModel):
    """Identifies the template from which the job's pods were last resolved."""

    epoch: Count
    """The epoch at which the whole set was last resolved: first start, resume, next pool, plain mode."""
    pool: str = Field(default="", max_length=253)
    """The TrainingPool in use; empty when the job names none."""
    on_demand_pool: str = Field(default="", max_length=253)
    """The TrainingPool of the first `minOnDemand` pods, where it is another one; else empty."""
    plain: bool = False
    """Whether the pods run without the agent."""
    spec_hash: str = Field(default="", max_length=64)
    """Hash of the pods' part of the spec at that epoch, without defaults; empty if an older operator resolved it."""

    @property
    def pools(self) -> tuple[str, ...]:
        """Return the names of all pools in use."""
        return tuple(name for name in (self.pool, self.on_demand_pool) if name)


class TrainingProgress(StatusModel):
    """Progress as the trainer reports it; written at most every 30 s."""

    step: Count
    """The last step that rank 0 reported."""
    total_steps: Count | None = None
    """Number of steps of the whole training."""
    steps_per_second: Seconds | None = None
    """Recent steps per second."""


class RestoreStatus(StatusModel):
    """The newest restore of the job's ranks."""

    id: str = Field(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}$", max_length=32)
    """`epoch.generation` of the generation that restored."""
    step: Count
    """The step that training went on from; 0 where there was no checkpoint."""
    tier: Annotated[Tier | None, BeforeValidator(_read_tier)] = None
    """The farthest place that any rank read from: its node's memory, another node's, or the store."""
    seconds: Seconds | None = None
    """Duration of the restore."""
    passed_over: Count = 0
    """Number of newer checkpoints that are damaged and were passed over."""
    lost_steps: Count | None = None
    """Steps that were trained before and are trained again; absent where the last step is not known."""


class CheckpointStatus(StatusModel):
    """The job's checkpoints, as everstep's library in its ranks reports them."""

    step: Count | None = None
    """The step of the newest checkpoint that training can go on from."""
    time: Time | None = None
    """When the leader heard of it."""
    bytes: Count | None = None
    """Its size, of all ranks."""
    stall_seconds: Seconds | None = None
    """How long it held up training."""
    failed_saves: Count = 0
    """Saves that failed since then."""
    restored: RestoreStatus | None = None
    lost_steps: Count = 0
    """Steps that were trained more than once, in all restarts."""
    trained_step: Count | None = None
    """The last step of training, counted as checkpoints are; `progress` may count something else."""
    steps_per_second: Seconds | None = None
    """The rate of these steps over the last half minute."""


class Charge(StatusModel):
    """One ended generation and the budget that paid for its successor."""

    id: str = Field(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}$", max_length=32)
    """`epoch.generation` of the generation that ended."""
    cause: KnownCause
    """The budget that paid."""
    time: Time
    """When the generation ended."""
    count: Annotated[int, Field(ge=1), Whole] = 1
    """Number of charges of this cause in this entry: a full list merges the oldest ones."""
    reason: str | None = Field(default=None, max_length=64)
    """Why the generation ended."""
    node: str | None = Field(default=None, max_length=253)
    """The node of the pod that failed or was lost."""

    @property
    def token(self) -> tuple[int, int]:
        """Return the id as an ordered pair (epoch, generation)."""
        epoch, _, generation = self.id.partition(".")
        return int(epoch), int(generation)


class Restarts(StatusModel):
    """Restarts so far. The counts cover the job's life; the budgets count `charges` within `restart.window`."""

    total: Count = 0
    """All restarts."""
    application: Count = 0
    """Restarts charged to failures of the program."""
    infrastructure: Count = 0
    """Restarts charged to lost pods and nodes."""
    preemption: Count = 0
    """Restarts after pre-emption, which no budget pays."""
    ignored: Count = 0
    """Restarts after exit codes for which `restart.onExitCodes` says `Ignore`, which no budget pays."""
    trained_step: Count | None = None
    """The farthest step that was made before the newest restart; kept where `restart.resetAfter` is set."""
    progress_since: Time | None = None
    """When the job first went beyond `trainedStep`."""
    reset_at: Time | None = None
    """Restarts until then do not count any more: the job made progress for `restart.resetAfter` after them."""
    charges: Annotated[list[Charge], Field(max_length=MAX_CHARGES), ListMap("id", lambda charge: charge.id)] = Field(
        default_factory=list
    )
    """The newest last."""

    @property
    def last(self) -> Charge | None:
        """Return the newest charge: what a leader is told has been charged already."""
        return max(self.charges, key=lambda charge: charge.token, default=None)

    def charge(self, charge: Charge) -> Self:
        """Return a copy with one more restart charged. An id that is not newer than the last one changes nothing, so
        nothing is charged twice.

        A full list folds its two oldest entries of one cause into one that bears the younger time: it may leave the
        window a little late, never too early.
        """
        if self.last is not None and charge.token <= self.last.token:
            return self
        field = charge.cause.value.lower()
        counts = {"total": self.total + charge.count, field: self.count(charge.cause) + charge.count}
        return self.model_copy(update={**counts, "charges": _limit_charges([*self.charges, charge])})

    def count(self, cause: Cause) -> int:
        """Return how many restarts were ever charged to ``cause``."""
        return int(getattr(self, cause.value.lower()))

    def within(self, cause: Cause, since: datetime) -> int:
        """Return how many restarts were charged to ``cause`` after ``since``."""
        return sum(charge.count for charge in self.charges if charge.cause == cause and charge.time > since)


_PAID_CAUSES = (Cause.APPLICATION, Cause.INFRASTRUCTURE)


def _limit_charges(charges: list[Charge]) -> list[Charge]:
    if len(charges) <= MAX_CHARGES:
        return charges
    # What no budget pays is folded first: nobody asks when it happened. Then those of the cause whose two oldest are
    # longer ago: what is folded bears the younger time, and must not be counted as new.
    places = {cause: [number for number, charge in enumerate(charges) if charge.cause == cause] for cause in Cause}
    several = [cause for cause, numbers in places.items() if len(numbers) >= 2]
    if not several:
        return charges
    cause = min(several, key=lambda each: (each in _PAID_CAUSES, places[each][1]))
    old, next_oldest = (charges[number] for number in places[cause][:2])
    folded = next_oldest.model_copy(update={"count": old.count + next_oldest.count})
    return [folded if charge is next_oldest else charge for charge in charges if charge is not old]


class StartFailures(StatusModel):
    """Failed starts of agents since ranks last ran."""

    count: Annotated[int, Field(ge=1), Whole]
    """Consecutive attempts in which an agent failed to start. Pods that fail together are one attempt."""
    made: Time
    """When the newest pod of the last such attempt was created; failures of older pods are counted already."""


class LastFailure(StatusModel):
    """The last failure."""

    cause: KnownCause
    """The budget that paid."""
    reason: ReasonWord
    node: str | None = Field(default=None, max_length=253)
    """The Kubernetes node of the failure."""
    rank: Count | None = None
    """The first rank that failed."""
    exit_code: Annotated[int, Whole] | None = None
    """Exit code of that rank; 128 + n after signal n."""
    message: Message = ""
    """The error message."""
    log_tail: list[Line] = Field(default_factory=list, max_length=MAX_LOG_LINES)
    """The last lines of the rank's standard error."""


class Disruption(StatusModel):
    """Nodes under the job's pods that go away, are drained or at fault, and what was done."""

    reason: ReasonWord
    source: str = Field(default="", max_length=1024)
    """The signal, as `taint karpenter.sh/disrupted`."""
    nodes: list[Annotated[str, Field(max_length=253)]] = Field(default_factory=list, max_length=MAX_DISRUPTED_NODES)
    noticed: Time
    """When the signal was first seen."""
    deadline: Time | None = None
    """When the first node may be gone; absent where they stay, and ranks only save."""
    saved_step: Count | None = None
    """Step of the checkpoint that was saved for it and is committed."""
    leaving: Time | None = None
    """Since when the pods on these nodes are deleted."""


class Transition(StatusModel):
    """One phase of the job, with its start and end."""

    phase: Annotated[Phase, Strict(False)]
    """The phase."""
    reason: ReasonWord = ""
    start: Time
    """When it began."""
    end: Time | None = None
    """When it ended; absent while it lasts."""


class Timings(StatusModel):
    """Time spent in each phase, in seconds; a phase is added when it ends."""

    pending: Seconds = 0.0
    """In phase Pending."""
    scheduling: Seconds = 0.0
    """In phase Scheduling."""
    starting: Seconds = 0.0
    """In phase Starting."""
    running: Seconds = 0.0
    """In phase Running."""
    recovering: Seconds = 0.0
    """In phase Restarting."""
    lost: Seconds = 0.0
    """Part of `running` in which steps were trained that a restart has lost, by the steps per second before it."""
    goodput: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of Running, without the lost part, in the time of Running and Restarting."""


class Usage(StatusModel):
    """Nodes that the job's pods have held, and what they cost by the prices of their pools."""

    until: Time
    """Nodes are counted up to this time: with each write of the status, at least every ten minutes."""
    spot_nodes: Count = 0
    """Nodes of spot capacity that pods held then."""
    on_demand_nodes: Count = 0
    """Nodes of on-demand capacity that pods held then."""
    spot_node_seconds: Seconds = 0.0
    """Time of nodes of spot capacity, each by itself."""
    on_demand_node_seconds: Seconds = 0.0
    """Time of nodes of on-demand capacity, each by itself."""
    unpriced_node_seconds: Seconds = 0.0
    """Part of both in pools without `pricePerHour`, or in none: `cost` lacks it."""
    cost: Annotated[float, Field(ge=0)] = 0.0
    """Price of that time, in the currency of the pools' prices."""
    savings: float = 0.0
    """How much more the spot nodes would have cost on demand, as far as that price is known."""


class TrainingJobStatus(StatusModel):
    """The state of a TrainingJob."""

    phase: Annotated[Phase, Strict(False)] | None = None
    observed_generation: Count = 0
    """The `metadata.generation` that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16), ListMap("type", lambda c: c.type.value)] = Field(
        default_factory=list
    )
    """The conditions Reconciling and Stalled of kstatus, and those of the job."""
    epoch: Count = 0
    """Raised before each creation of pod 0: the first half of the fencing token."""
    generation: Count = 0
    """Counted by the leader inside its epoch: the second half of the fencing token."""
    template: TemplateStatus | None = None
    nodes: Count = 0
    """Number of pods that the job needs now."""
    ready_nodes: Count = 0
    """Number of pods whose trainer container runs."""
    progress: TrainingProgress | None = None
    checkpoint: CheckpointStatus | None = None
    restarts: Restarts = Restarts()
    start_failures: StartFailures | None = None
    last_failure: LastFailure | None = None
    disruption: Disruption | None = None
    transitions: list[Transition] = Field(default_factory=list, max_length=MAX_TRANSITIONS)
    """The phases so far, the newest last."""
    timings: Timings = Timings()
    usage: Usage | None = None

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of that type, or None if it was never set."""
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def is_true(self, kind: ConditionType) -> bool:
        """Return whether the condition is set and True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"

    def is_false(self, kind: ConditionType) -> bool:
        """Return whether the condition is set and False."""
        found = self.condition(kind)
        return found is not None and found.status == "False"
