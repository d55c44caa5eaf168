"""The actions of a plan: values only, no code. The runtime carries them out, in the plan's order.

The contract (001, "Order in a reconcile"):

1. `JobPlan.status` is written first if it differs from what was observed, with the observed resourceVersion. If that
   fails, nothing of the plan happens. So an epoch or a charge is on record before anything follows from it.
2. The actions run in order; those next to each other that are alike (pods of one `CreatePods`) may run in parallel.
   Each is idempotent: to find its work done already is success.
3. An action that the API server refuses stops the list; the plan is made again with `Observation.rejection`, once.
4. `JobPlan.events` are sent last: no event tells what did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_operator.api.status import TrainingJobStatus
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.node_failures import NodeFailure


@dataclass(frozen=True, slots=True)
class EnsureService:
    """Headless Service `<job>` that publishes not-ready addresses."""

    name: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NamePods:
    """Let the Service of a job select all of its pods, which have addresses now. May be asked for again and
    again: the runtime does it once. That it is rejected holds nothing up: ranks find each other without names."""

    body: Mapping[str, Any]  # the Service with that selector, should it have been deleted


@dataclass(frozen=True, slots=True)
class EnsureSecret:
    """Immutable Secret; the runtime adds the key `token` = HMAC-SHA256(operator key, job UID + "/" + template)."""

    name: str
    template: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EnsureAgent:
    """The agent's ConfigMap in the job's namespace. `name` is what the frozen template mounts; if that is not the name
    of the present operator's agent, an older operator has made it, and it must be there with its content."""

    name: str
    digest: str  # SHA-256 of agent.pyz, as the frozen template says; empty in one of before templates said it


@dataclass(frozen=True, slots=True)
class EnsureTemplate:
    """Immutable ConfigMap with job.json and template.json (in `body.data`)."""

    name: str
    template: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DryRun:
    """Let the API server judge pod 0 of a new template, before anything is made from it."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CreatePods:
    """Create these pods in parallel. `frozen` is the template they come from; `pods.build_pod(frozen, index, epoch,
    leader)` makes one body at a time, so that thousands of them never exist together.

    AlreadyExists: success if the object's controller is this job, else a `Conflict` rejection.
    """

    indices: tuple[int, ...]
    epoch: int
    frozen: FrozenTemplate
    leader: str = ""  # ip:port of the leader that already runs, for them to announce themselves to
    avoid: tuple[str, ...] = ()  # names of nodes on which they must not be
    shun: tuple[str, ...] = ()  # and of those on which they are only if nothing else is free


@dataclass(frozen=True, slots=True)
class PodRef:
    name: str
    uid: str
    grace_seconds: int | None = None  # None: the pod's own


@dataclass(frozen=True, slots=True)
class DeletePods:
    """Delete these, with their UID as precondition."""

    pods: tuple[PodRef, ...]
    why: str  # a reason constant, for logs and metrics


@dataclass(frozen=True, slots=True)
class DeleteStaleObjects:
    """Delete the job's Secrets and ConfigMaps of template epochs below `template`: no pod uses them any more."""

    template: int


@dataclass(frozen=True, slots=True)
class EnsureBudget:
    """The PodDisruptionBudget `<job>`. A job runs without it where the API server rejects it, or somebody else has one
    of this name; an event says so."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteBudget:
    """Delete the job's PodDisruptionBudget, with its UID as precondition."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class MarkOutOfService:
    """Set the out-of-service taint on a dead node, so that its volumes are detached. That it is rejected holds nothing
    up: they are then detached later."""

    node: str


@dataclass(frozen=True, slots=True)
class PushPeers:
    """`POST /v1/peers` to the leader. May be asked for again and again: the runtime skips what this leader has had."""

    epoch: int
    addresses: Mapping[int, str]  # index -> ip:port


@dataclass(frozen=True, slots=True)
class StopLeader:
    """`POST /v1/stop`. To reach nobody is success: the planner deletes the pods after the grace anyway."""

    reason: str


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """`POST /v1/checkpoint` to the leader, which passes each id on once. A plan asks again until the leader's state
    tells of the id, so that a request is neither lost nor repeated."""

    id: str
    deadline: float | None  # Unix seconds; None: no hurry


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the TrainingJob itself (TTL), with its UID as precondition."""

    uid: str


Action = (
    EnsureService
    | NamePods
    | EnsureSecret
    | EnsureAgent
    | EnsureTemplate
    | DryRun
    | CreatePods
    | DeletePods
    | DeleteStaleObjects
    | EnsureBudget
    | DeleteBudget
    | MarkOutOfService
    | PushPeers
    | StopLeader
    | RequestCheckpoint
    | DeleteJob
)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A Kubernetes Event about the job."""

    type: str  # Normal | Warning
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class LeaderPoll:
    """Keep a long poll to this leader going: `GET /v1/state?…&charged=<charged>&allowance=<allowance>`."""

    address: str  # ip:port
    pod_uid: str  # another uid is another leader: forget the last view
    epoch: int
    template: int  # whose token
    charged: str  # id of the newest ended generation on record; empty: none
    allowance: int  # application restarts left after it
    token_secret: str = ""  # the Secret that the leader's pod mounts: by its name the operator knows the token's key
    num_nodes: int = 1  # bounds what its answer may be


@dataclass(frozen=True, slots=True)
class JobPlan:
    """`status` None: the job is none of our business (managed by another controller, or being deleted)."""

    status: TrainingJobStatus | None = None
    changed: bool = False  # status differs from the observed one and is to be written
    actions: tuple[Action, ...] = ()
    events: tuple[JobEvent, ...] = ()
    requeue_at: float | None = None  # look again at this time at the latest, though nothing happens
    poll: LeaderPoll | None = None
    # With no `poll`: the leader is not to be asked, but what it said last stays known. It is evidence of a dead node
    # until its pod is gone.
    holds_leader: bool = False
    suspects: frozenset[str] = frozenset()  # nodes that may be dead: their Leases are to be read
    node_failures: Mapping[str, NodeFailure] = field(default_factory=dict)  # that this plan learns of, by node
