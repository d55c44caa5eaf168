"""The observation that a plan is made from: everything that was read, sorted once into small frozen values.

`parse_pod` is the only place that looks at a raw pod, `parse_leader_state` (leader_view.py) the only one that looks at
an agent's JSON. All strings that come from outside are bounded here, so that nothing downstream has to think about it.
Times are Unix seconds (UTC); None means "has not happened, as far as is known".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from operator import attrgetter
from typing import Any

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.pool import TrainingPool
from everstep_operator.plan.affinity import list_excluded_nodes
from everstep_operator.plan.agent_volume import find_template_config_map, find_token_secret
from everstep_operator.plan.container_waits import find_container_wait
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.kubelet_ends import find_kubelet_end
from everstep_operator.plan.labels import LABEL_EPOCH, LABEL_INDEX, LABEL_JOB, LABEL_TEMPLATE
from everstep_operator.plan.leader_view import (
    MAX_TIME,
    LeaderProgress,
    LeaderView,
    ReportedCheckpoint,
    ReportedGeneration,
    parse_checkpoint,
    parse_history_words,
    parse_ordinal,
    parse_progress,
)
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.rejection import Rejection
from everstep_operator.plan.truncated_json import parse_whole_fields

TRAINER_CONTAINER = "trainer"
EPOCH_VARIABLE, EPOCH_OPTION = "EVERSTEP_EPOCH", "--epoch="
INIT_FAILED = "InitContainerFailed"  # a ContainerEnd's reason: not the trainer's end, but of what was to prepare it

MAX_MESSAGE = 1024
MAX_EPOCHS_LOST = 1_000_000  # more than any job gets: of a pod that somebody else has made up
MAX_TERMINATION_LOG = 4096


@dataclass(frozen=True, slots=True)
class TerminationMessage:
    """A message that an agent left in its termination log (001, "Ends")."""

    result: str  # succeeded | failed | stopped | fenced | unclean | unusable
    epoch: int = 0
    generation: int = 0
    rank: int | None = None
    exit_code: int | None = None
    message: str = ""
    log_tail: tuple[str, ...] = ()
    history: tuple[ReportedGeneration, ...] = ()  # agent 0's: id and cause only
    progress: LeaderProgress | None = None  # agent 0's
    checkpoint: ReportedCheckpoint | None = None  # agent 0's


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """The trainer container is over, or never will be (a pod that the kubelet refused or evicted has no exit code)."""

    exit_code: int | None
    signal: int | None
    reason: str  # Completed, Error, OOMKilled, StartError, Evicted, UnexpectedAdmissionError, INIT_FAILED …
    message: str  # the text of the termination log, or the kubelet's
    finished_at: float | None
    word: TerminationMessage | None = None


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of the job, judged by its trainer container: sidecars may outlive it and change the pod's phase."""

    index: int
    name: str
    uid: str
    epoch: int
    template: int
    created: float
    owner: str = ""  # UID of the controller owner reference
    phase: str = "Pending"
    node: str | None = None
    ip: str | None = None
    scheduled_at: float | None = None
    unschedulable: str = ""  # the scheduler's message while it finds no node
    gated: bool = False  # a queue, such as Kueue, keeps it from the scheduler (`spec.schedulingGates`)
    started_at: float | None = None  # the trainer container was started (and may be over)
    ended: ContainerEnd | None = None
    ended_by: str = ""  # why the kubelet ended all of it: Evicted, Terminated (with its machine) …
    deleting_since: float | None = None
    deletion_grace: int = 0  # seconds; 0 also where the API server knew that all of it had ended
    waiting_reason: str = ""  # of the container: ImagePullBackOff, CreateContainerConfigError …
    waiting_message: str = ""
    container_wait: str = ""  # why one of its containers cannot be started: an image, a Secret …
    disruption: str | None = None  # reason of a true DisruptionTarget condition, or of Kueue's own
    gone_since: float | None = None  # when its node was removed from the cluster, or died (`Observation.ours`)
    token_secret: str = ""  # name of the Secret that it mounts as its token
    avoids: frozenset[str] = frozenset()  # names of nodes on which it may not be bound, while it has none
    listed: bool = True  # it has the label by which pods are listed and watched
    is_epoch_fixed: bool = False  # it stands in the pod's spec, which nobody can change, and not only in a label
    finalizers: str = ""  # of a pod that is being deleted: they keep it, and its name, after all of it has ended
    notice: str = ""  # reason for which its node goes away (`Observation.ours`)
    on_spot: bool = False  # the provider may reclaim its node at any time (`Observation.ours`)

    @property
    def scheduled(self) -> bool:
        return self.scheduled_at is not None

    @property
    def deleting(self) -> bool:
        return self.deleting_since is not None

    @property
    def running(self) -> bool:
        return self.started_at is not None and self.ended is None

    @property
    def occupies(self) -> bool:
        """Return whether the pod holds its node and GPUs, and nobody has asked it to leave: a sidecar may outlive the
        trainer in it."""
        return self.phase not in ("Succeeded", "Failed") and self.deleting_since is None and self.gone_since is None

    @property
    def live(self) -> bool:
        """Return whether ranks may run in the pod now or later: nobody has asked it to leave, and its node exists."""
        return self.ended is None and self.deleting_since is None and self.gone_since is None

    def format_address(self, port: int) -> str:
        """Return the address of a port of the pod, as in a URL: an IPv6 address stands in brackets."""
        return f"[{self.ip}]:{port}" if self.ip and ":" in self.ip else f"{self.ip}:{port}"


@dataclass(frozen=True, slots=True)
class GangView:
    """Another job that waits for its set of pods (phase Pending or Scheduling, or Restarting with a pod unbound)."""

    key: str  # namespace/name
    uid: str
    created: float
    pools: frozenset[str]  # the pool it tries now; empty set = the cluster at large
    wanted: int
    scheduled: int = 0  # pods bound now; 0 after a release
    released_at: float | None = None  # when it last gave its nodes back
    recovering: bool = False  # it has run, and waits for the nodes of a few pods (phase Restarting)
    places: int | None = None  # pods of its that today's nodes could hold, counted up to `wanted`; None: unknown
    # Something that is no lack of nodes keeps the set from being complete, or did when it gave its pods back.
    blocked: bool = False
    quota: str = ""  # then: the namespace, if it is a quota of it; `scheduled` are all of its pods
    gated: bool = False  # a queue, such as Kueue, keeps pods of it from the scheduler

    @property
    def possible(self) -> bool:
        """Return whether today's nodes could hold the whole set. It is a presumption: nodes are added and removed."""
        return self.places is None or self.places >= self.wanted


@dataclass(frozen=True, slots=True)
class BudgetView:
    """A PodDisruptionBudget of the name that the job's has."""

    name: str
    uid: str
    owner: str  # UID of the controller owner reference
    min_available: int | None  # None: not a number


_ORDER = attrgetter("index", "created", "uid")


@dataclass(frozen=True)
class Observation:
    """All that one plan may know. `pods` holds every pod with the job's label, also foreign and ended ones, and must
    include the caller's own earlier writes (a cache that has not seen a create yet makes a plan create again, which
    the pod's name then refuses)."""

    job: TrainingJob
    pods: tuple[PodView, ...] = ()
    pools: Mapping[str, TrainingPool] = field(default_factory=dict)  # those that the job names and that exist
    leader: LeaderView | None = None  # of the current pod 0; None: never asked
    gangs: tuple[GangView, ...] = ()  # of all jobs that wait, in any namespace, perhaps of this one too
    frozen: FrozenTemplate | None = None  # of status.template.epoch; None: not there
    settings: PlanSettings = field(default_factory=PlanSettings)
    rejection: Rejection | None = None
    status_written_at: float | None = None  # of the observed status; None: unknown, long ago
    nodes: Mapping[str, NodeView] = field(default_factory=dict)  # those under the pods, as far as they are known
    silent_nodes: tuple[str, ...] = ()  # of any job; the scheduler may take them for Ready for a minute
    avoided_nodes: tuple[str, ...] = ()  # on which jobs have failed before
    places: int | None = None  # pods of the set that today's nodes could hold, up to those wanted; None: unknown
    claims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # access modes of those that pods mount
    budget: BudgetView | None = None  # None: there is none, or the operator makes none
    scale_up_at: float | None = None  # a node autoscaler last said that it is making room for the pods (0: never has)
    gated_at: float | None = None  # until when a queue kept pods from the scheduler, as far as it was seen

    @cached_property
    def ours(self) -> tuple[PodView, ...]:
        """Return the job's own pods by index; an object of another UID is never adopted."""
        uid, newest, odd = self.job.metadata.uid, self.newest_epoch, self._list_odd_nodes()
        mine = [  # of thousands of pods nearly all are as they were read
            p if 0 <= p.epoch <= newest and p.node not in odd else self._on_its_node(self._of_an_epoch_given_out(p))
            for p in self.pods
            if p.owner == uid
        ]
        return tuple(sorted(mine, key=_ORDER))

    def _list_odd_nodes(self) -> set[str | None]:
        """Return the names of nodes that tell something of the pods on them: see `_on_its_node`."""
        known = self.job.status.disruption
        odd: set[str | None] = set(known.nodes if known is not None else ())
        return odd | {
            name
            for name, node in self.nodes.items()
            if node.spot or node.signal is not None or node.lost_since is not None
        }

    @cached_property
    def newest_epoch(self) -> int:
        """Return the newest epoch that was given out: the status has it, unless somebody has lowered or removed it."""
        uid, known = self.job.metadata.uid, self.job.status.epoch
        fixed = [p.epoch for p in self.pods if p.is_epoch_fixed and p.owner == uid and p.epoch > known]
        return max([known, *(epoch for epoch in fixed if epoch <= known + MAX_EPOCHS_LOST)])

    def _of_an_epoch_given_out(self, pod: PodView) -> PodView:
        """Return a pod with an epoch that was given out. Whoever may change pods may change their labels; an epoch is
        in the status before a pod has it."""
        return pod if 0 <= pod.epoch <= self.newest_epoch else replace(pod, epoch=self.newest_epoch)

    def _on_its_node(self, pod: PodView) -> PodView:
        node, known = self.nodes.get(pod.node) if pod.node else None, self.job.status.disruption
        notice = known.reason if known is not None and known.deadline is not None and pod.node in known.nodes else ""
        if node is None:
            return replace(pod, notice=notice) if notice else pod
        if not notice and node.signal is not None and node.signal.seconds is not None:  # near, before it is on record
            notice = node.signal.reason.value
        on_spot = node.spot and pod.ended is not None  # nobody asks before
        if node.lost_since is None and not notice and not on_spot:
            return pod
        return replace(pod, gone_since=node.lost_since, notice=notice, on_spot=on_spot)


def parse_pod(raw: Mapping[str, Any], before: PodView | None = None) -> PodView:
    """Sort out one pod as the API server gives it. Never raises on odd values: a pod is then of index or epoch -1.

    Args:
        raw: The pod, or the part of it that is read.
        before: What an earlier state of the name reads like; what never changes in one pod is taken from it.
    """
    meta: Mapping[str, Any] = raw.get("metadata") or {}
    spec: Mapping[str, Any] = raw.get("spec") or {}
    status: Mapping[str, Any] = raw.get("status") or {}
    labels: Mapping[str, Any] = meta.get("labels") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or ()}
    bound = conditions.get("PodScheduled") or {}
    owner: Mapping[str, Any] = next((o for o in meta.get("ownerReferences") or () if o.get("controller")), {})
    job, uid, owner_uid = str(owner.get("name") or ""), str(meta.get("uid") or ""), str(owner.get("uid") or "")
    known = (before.uid, before.owner) if before is not None and before.is_epoch_fixed else None
    fixed = before if uid and known == (uid, owner_uid) else None
    created = fixed.created if fixed is not None else parse_timestamp(meta.get("creationTimestamp")) or 0.0
    scheduled_at = None
    if spec.get("nodeName"):
        bound_at = parse_timestamp(bound.get("lastTransitionTime")) if bound.get("status") == "True" else None
        scheduled_at = bound_at or created
    gated = bool(spec.get("schedulingGates"))
    # The condition tells of gates until the scheduler comes to the pod, which may be long after they are gone.
    tried = scheduled_at is None and (gated or bound.get("reason") != "SchedulingGated")
    container: Mapping[str, Any] = next(
        (c for c in status.get("containerStatuses") or () if c.get("name") == TRAINER_CONTAINER), {}
    )
    state: Mapping[str, Any] = container.get("state") or {}
    waiting: Mapping[str, Any] = state.get("waiting") or {}
    over: Mapping[str, Any] | None = state.get("terminated")
    current: Mapping[str, Any] = over or state.get("running") or {}
    token_secret = fixed.token_secret if fixed is not None else find_token_secret(spec)
    fixed_epoch = fixed.epoch if fixed is not None else _parse_fixed_epoch(spec) if token_secret else -1
    kept_by = (meta.get("finalizers") or ()) if meta.get("deletionTimestamp") else ()
    return PodView(
        index=_parse_index(str(meta.get("name") or ""), job, labels),
        name=str(meta.get("name") or ""),
        uid=uid,
        epoch=fixed_epoch if fixed_epoch >= 0 else parse_ordinal(labels.get(LABEL_EPOCH), -1),
        is_epoch_fixed=fixed_epoch >= 0,
        template=fixed.template if fixed is not None else _parse_template_epoch(spec, job, labels),
        created=created,
        owner=owner_uid,
        phase=str(status.get("phase") or "Pending"),
        node=spec.get("nodeName") or None,
        ip=status.get("podIP") or None,
        scheduled_at=scheduled_at,
        unschedulable=clip_text(bound.get("message")) if tried else "",
        gated=scheduled_at is None and gated,
        # Of a container that its runtime could not start, kubelets tell a start in 1970.
        started_at=parse_timestamp(current.get("startedAt")) or None,
        ended=_parse_container_end(over) if over else _parse_pod_end(status),
        ended_by=clip_text(find_kubelet_end(status), 128),
        deleting_since=_deleting_since(meta),
        deletion_grace=_as_integer(meta.get("deletionGracePeriodSeconds"), 0),
        waiting_reason=clip_text(waiting.get("reason"), 128),
        waiting_message=clip_text(waiting.get("message")),
        container_wait=clip_text(find_container_wait(status, TRAINER_CONTAINER)),
        disruption=_find_disruption(conditions),
        token_secret=token_secret,
        avoids=list_excluded_nodes(spec) if scheduled_at is None else frozenset(),
        listed=LABEL_JOB in labels,
        finalizers=clip_text(", ".join(map(str, kept_by))),
    )


def _find_disruption(conditions: Mapping[Any, Mapping[str, Any]]) -> str | None:
    """Return why somebody takes the pod away, or None. Kueue has a condition of its own."""
    for kind in ("DisruptionTarget", "TerminationTarget"):
        found = conditions.get(kind) or {}
        if found.get("status") == "True":
            return clip_text(found.get("reason"), 128)
    return None


def _parse_index(name: str, job: str, labels: Mapping[str, Any]) -> int:
    """Return the replica index. Anybody who may change pods may change their labels; a name stays as it is."""
    prefix, _, suffix = name.rpartition("-")
    return parse_ordinal(suffix if job and prefix == job else labels.get(LABEL_INDEX), -1)


def _parse_template_epoch(spec: Mapping[str, Any], job: str, labels: Mapping[str, Any]) -> int:
    """Return the epoch of the template: the name of its ConfigMap has it, and volumes stay as they are."""
    found = find_template_config_map(spec, job)
    return parse_ordinal(found[1] if found is not None else labels.get(LABEL_TEMPLATE), -1)


def _parse_fixed_epoch(spec: Mapping[str, Any]) -> int:
    """Return the epoch that an agent is told by its command, or by a value of its environment as with older templates;
    -1 where it is not: still older ones refer to the label."""
    containers = spec.get("containers") or ()
    trainer: Mapping[str, Any] = next((c for c in containers if c.get("name") == TRAINER_CONTAINER), {})
    words = [str(word) for word in trainer.get("command") or ()]
    if (word := next((word for word in words if word.startswith(EPOCH_OPTION)), None)) is not None:
        return parse_ordinal(word[len(EPOCH_OPTION) :], -1)
    told: Mapping[str, Any] = next((e for e in trainer.get("env") or () if e.get("name") == EPOCH_VARIABLE), {})
    return parse_ordinal(told.get("value"), -1)


def _deleting_since(meta: Mapping[str, Any]) -> float | None:
    """Return when the delete was asked for: `deletionTimestamp` is when the grace ends."""
    at = parse_timestamp(meta.get("deletionTimestamp"))
    return None if at is None else at - max(0, _as_integer(meta.get("deletionGracePeriodSeconds"), 0))


def _parse_container_end(over: Mapping[str, Any]) -> ContainerEnd:
    message = clip_text(over.get("message"), MAX_TERMINATION_LOG).rstrip()  # the end of a log ends with a newline
    code = over.get("exitCode")
    exit_code = _as_int32(code)
    # Container runtimes report a death by signal as 128 + signal and leave the field `signal` empty.
    signal = over.get("signal") or (exit_code - 128 if exit_code is not None and 128 < exit_code < 160 else None)
    reason, at = clip_text(over.get("reason"), 128), parse_timestamp(over.get("finishedAt"))
    return ContainerEnd(exit_code, signal, reason, message, at, parse_termination_message(message))


def _parse_pod_end(status: Mapping[str, Any]) -> ContainerEnd | None:
    """Return the end of a pod without its container having a say: rejected by the kubelet, evicted, node shut down, or
    never begun because an init container failed."""
    if status.get("phase") not in ("Failed", "Succeeded"):
        return None
    if not status.get("reason") and (end := _parse_init_failure(status)) is not None:
        return end
    return ContainerEnd(
        None, None, clip_text(status.get("reason"), 128) or "PodFailed", clip_text(status.get("message")), None
    )


def _parse_init_failure(status: Mapping[str, Any]) -> ContainerEnd | None:
    """Return how the first init container that failed has ended, or None: the pod never ran its own containers."""
    for container in status.get("initContainerStatuses") or ():
        over = (container.get("state") or {}).get("terminated")
        end = _parse_container_end(over) if over else None
        if end is None or end.exit_code in (None, 0):
            continue
        how = f"{end.reason}, exit code {end.exit_code}" if end.reason else f"exit code {end.exit_code}"
        message = f"init container {container.get('name')} failed ({how})"
        if end.message:
            message = f"{message}: {end.message}"
        return replace(end, reason=INIT_FAILED, message=clip_text(message), word=None)
    return None


def parse_termination_message(text: str) -> TerminationMessage | None:
    """Return the agent's JSON in a termination log, or None: the user's program may have written there too.

    Args:
        text: The log, or its beginning: of a pod with many containers a kubelet keeps no more.
    """
    try:
        data = json.loads(text) if text.startswith("{") else None
    except RecursionError:
        return None
    except ValueError:
        data = parse_whole_fields(text)
    if not isinstance(data, dict) or not isinstance(data.get("result"), str):
        return None
    tail = data.get("logTail")
    return TerminationMessage(
        result=clip_text(data["result"], 32),
        epoch=parse_ordinal(data.get("epoch")),
        generation=parse_ordinal(data.get("generation")),
        rank=_as_int32(data.get("rank"), least=0),
        exit_code=_as_int32(data.get("exitCode")),
        message=clip_text(data.get("message")),
        log_tail=tuple(clip_text(line, 512) for line in tail[-20:]) if isinstance(tail, list) else (),
        history=parse_history_words(data.get("generationHistory")),
        progress=parse_progress(data.get("progress")),
        checkpoint=parse_checkpoint(data.get("checkpoint"), MAX_TIME),
    )


def clip_text(value: Any, limit: int = MAX_MESSAGE) -> str:
    """Return the value as text of at most `limit` characters; nothing for None."""
    # JSON can spell half of a surrogate pair; such text is not UTF-8, and no status can hold it.
    text = str(value).encode(errors="replace").decode() if value is not None else ""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def parse_timestamp(value: Any) -> float | None:
    """Return the Unix seconds of an RFC 3339 time as Kubernetes writes them, or None."""
    if isinstance(value, datetime):
        return value.timestamp()
    if not isinstance(value, str):
        return None
    try:
        return datetime.fromisoformat(value).timestamp()
    except ValueError:
        return None


def _as_integer(value: Any, default: int = -1) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):  # the last one for Infinity, which JSON spells 1e999
        return default


def _as_int32(value: Any, least: int = -(2**31)) -> int | None:
    """Return a 32-bit integer, or None: others are made up, and the API server would reject the status that tells of
    them."""
    return value if type(value) is int and least <= value < 2**31 else None  # True is none
