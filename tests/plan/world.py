"""A cluster that obeys the planner: pods, one leader and an API server in memory, under a fake clock.

It is as forgetful and as late as a real one: reads may be stale, writes may be lost, the operator may die between any
two of its steps. What it never does is break its own promises: a name belongs to one pod object, a delete with another
UID deletes nothing, a status write with an old resourceVersion is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.restart import ExitCodeAction
from everstep_operator.api.status import TrainingJobStatus
from everstep_operator.plan import make_plan, pod_creation
from everstep_operator.plan.actions import (
    Action,
    CreatePods,
    DeleteJob,
    DeletePods,
    EnsureTemplate,
    JobEvent,
    JobPlan,
    RequestCheckpoint,
    StopLeader,
)
from everstep_operator.plan.affinity import list_excluded_nodes
from everstep_operator.plan.agent_volume import find_token_secret
from everstep_operator.plan.leader_view import (
    LeaderOutcome,
    LeaderProgress,
    LeaderView,
    ReportedCheckpoint,
    RequestedCheckpoint,
    SickGpu,
    UncleanPod,
)
from everstep_operator.plan.node_loss import declare_lost_nodes
from everstep_operator.plan.node_signals import NodeSignal
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import (
    ContainerEnd,
    GangView,
    Observation,
    PodView,
    TerminationMessage,
)
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.rejection import Rejection
from everstep_operator.plan.template import config_map_name_of
from tests.builders import CREATED
from tests.plan.simulated_leader import SimulatedLeader
from tests.plan.simulated_templates import find_frozen_template

START = CREATED.timestamp()


class OperatorDied(Exception):
    """Raised inside a reconcile at the place where a test wants the operator to be killed."""


class World:
    """One job and its pods."""

    def __init__(self, job: TrainingJob, *, capacity: int = 10_000, now: float = START) -> None:
        self.job, self.capacity, self.now = job, capacity, now
        self.version = 1
        self.pods: dict[str, PodView] = {}
        self.config_maps: dict[str, object] = {}
        self.leader: SimulatedLeader | None = None
        self.leader_reachable, self.deleted_job = True, False
        self.answered_at: float | None = None
        self.operator_since = float("-inf")
        self.asked: tuple[str, float] | None = None  # the pod 0 that the operator polls, and since when
        self.gangs: tuple[GangView, ...] = ()
        self.pools: dict[str, object] = {}
        self.sidecars = False  # an ordinary container beside the trainer, which never ends
        self.nodes: dict[str, NodeView] = {}  # in which something is wrong
        self.scale_up_at = 0.0  # an autoscaler's word, for whoever asks
        self.settings = PlanSettings()
        self.events: list[JobEvent] = []
        self.statuses: list[TrainingJobStatus] = []
        self.broken, self.led = 0, 0  # generations that ended early; the highest epoch that ever had a pod 0
        self.requests, self.checkpoint, self.asked_for_room, self._uids = 0, 0, 0, 0
        self.last: JobPlan | None = None
        self.written_at: float | None = None
        self.refuse: Callable[[Action], Rejection | None] = lambda _: None
        self.unclean: tuple[UncleanPod, ...] = ()
        self.mute: set[str] = set()  # UIDs of pods whose agents nobody hears
        self.sick_gpus: tuple[SickGpu, ...] = ()
        self.avoided_nodes: tuple[str, ...] = ()  # on which jobs have failed before
        self.saves_in: float | None = 2.0  # seconds from a request to its commit; None: ranks do not save
        self.asked_for: list[tuple[str, float | None]] = []  # requests that reached a leader
        self.reported: ReportedCheckpoint | None = None  # by the leader

    # --- the operator

    def observe(self, *, pods: dict[str, PodView] | None = None, rejection: Rejection | None = None) -> Observation:
        seen = self.pods if pods is None else pods
        frozen = find_frozen_template(self.job, self.config_maps, self.settings) if self.job.status.template else None
        return Observation(
            job=self.job,
            pods=tuple(seen.values()),
            pools=self.pools,  # type: ignore[arg-type]
            leader=self.view(),
            gangs=self.gangs,
            frozen=frozen,
            settings=self.settings,
            rejection=rejection,
            status_written_at=self.written_at,
            nodes=declare_lost_nodes(
                self.job, self.nodes, seen.values(), self.view(), frozen=frozen, settings=self.settings, now=self.now
            ),
            avoided_nodes=self.avoided_nodes,
            silent_nodes=tuple(sorted(name for name, node in self.nodes.items() if node.silent_since is not None)),
        )

    def view(self) -> LeaderView | None:
        leader, head = self.leader, self.pods.get(f"{self.job.metadata.name}-0")
        asked, since = self.asked or ("", self.now)
        unheard = LeaderView(reachable=False, asked_since=since) if head is not None and head.uid == asked else None
        if leader is None:
            return unheard
        reachable = self.leader_reachable and leader.uid not in self.mute
        if reachable:
            self.answered_at = self.now
        elif self.answered_at is None:
            return unheard
        present = {p.uid: p.index for p in self.pods.values() if p.running and p.uid not in self.mute}
        missing = tuple(sorted(set(range(self.job.spec.num_nodes)) - set(present.values())))
        began = leader.started_at if (leader.started_at or 0.0) > self.operator_since else None  # as it is known
        return LeaderView(
            reachable=reachable,
            asked_since=since,
            answered_at=self.answered_at,
            epoch=leader.epoch,
            generation=leader.generation,
            phase="ended" if leader.outcome else leader.phase,
            missing=missing,
            unclean=self.unclean,
            sick_gpus=self.sick_gpus,
            running_since=began if leader.phase == "running" else None,
            progress=LeaderProgress(leader.step, 1000, 1.0) if leader.generation else None,
            checkpoint=self.reported,
            checkpoint_request=RequestedCheckpoint(leader.request, leader.saved_step) if leader.request else None,
            history=tuple(leader.history),
            outcome=leader.outcome,
        )

    def reconcile(self, *, pods: dict[str, PodView] | None = None, die_after: int | None = None) -> JobPlan:
        """Observe, plan, write, act. `die_after`: how many actions follow the status write before it is killed."""
        made = self._plan(self.observe(pods=pods))
        rejection = self._carry_out(made, die_after)
        if rejection is not None:
            made = make_plan(self.observe(pods=pods, rejection=rejection), self.now)
            assert self._carry_out(made, None) is None
        self.last = made
        if made.poll is None and not made.holds_leader:
            self.answered_at = None
        if made.poll is None or self.asked is None or made.poll.pod_uid != self.asked[0]:
            self.asked = (made.poll.pod_uid, self.now) if made.poll is not None else None
        if made.poll is not None and self.leader is not None and self.leader_reachable:
            self.leader.charged, self.leader.budget = made.poll.charged, made.poll.allowance
        return made

    def _plan(self, observed: Observation) -> JobPlan:
        made = make_plan(observed, self.now)
        if pod_creation.find_pod_to_scale_up(observed, made) is None:
            return made
        self.asked_for_room += 1
        return make_plan(dataclasses.replace(observed, scale_up_at=self.scale_up_at), self.now)

    def _carry_out(self, made: JobPlan, die_after: int | None) -> Rejection | None:
        if made.changed:
            assert made.status is not None
            self._write(made.status)
        for number, action in enumerate(made.actions):
            if die_after == number:
                raise OperatorDied
            refused = self.refuse(action)
            self.requests += 1
            if refused is not None:
                return refused
            self._act(action)
        if die_after is not None:
            raise OperatorDied
        self.events += made.events
        self.requests += len(made.events)
        return None

    def _write(self, status: TrainingJobStatus) -> None:
        assert TrainingJobStatus.parse(status.manifest()) == status, "what is written must read back the same"
        assert status != self.job.status, "a write that changes nothing"
        self.statuses.append(status)
        self.job = self.job.model_copy(update={"status": status})
        self.version += 1
        self.requests += 1
        self.written_at = self.now

    def _act(self, action: Action) -> None:
        if isinstance(action, CreatePods):
            assert config_map_name_of(action.frozen) in self.config_maps, "pods before their template"
            self.requests += len(action.indices) - 1
            for index in action.indices:
                self._create(build_pod(action.frozen, index, action.epoch, action.leader, action.avoid))
        elif isinstance(action, DeletePods):
            self.requests += len(action.pods) - 1
            for ref in action.pods:
                pod = self.pods.get(ref.name)
                if ref.grace_seconds is not None:
                    assert pod is None or pod.uid != ref.uid or self._removed(pod.node), "a forced pod may still run"
                    if pod is not None and pod.uid == ref.uid:
                        del self.pods[ref.name]
                    continue
                if pod is not None and pod.uid == ref.uid and not pod.deleting:
                    self.pods[ref.name] = dataclasses.replace(pod, deleting_since=self.now)
        elif isinstance(action, EnsureTemplate):
            self.config_maps.setdefault(action.name, action.body)
        elif isinstance(action, StopLeader) and self.leader is not None and self.leader.outcome is None:
            self.leader.outcome = LeaderOutcome("stopped")
        elif isinstance(action, RequestCheckpoint) and self.leader is not None and self.leader_reachable:
            if action.id != self.leader.request:
                self.asked_for.append((action.id, action.deadline))
                due = self.now + self.saves_in if self.saves_in is not None else None
                self.leader.request, self.leader.request_due, self.leader.saved_step = action.id, due, None
        elif isinstance(action, DeleteJob):
            assert action.uid == self.job.metadata.uid
            self.deleted_job = True

    def _create(self, body: dict[str, object]) -> None:
        meta: dict[str, dict[str, str]] = body["metadata"]  # type: ignore[assignment]
        name, labels = str(meta["name"]), meta["labels"]
        if name in self.pods:
            return  # AlreadyExists: the name is the lock
        self._uids += 1
        if labels["everstep.dev/index"] == "0":
            epoch = int(labels["everstep.dev/epoch"])
            assert epoch > self.led, "two leaders of one epoch"
            self.led = epoch
        self.pods[name] = PodView(
            index=int(labels["everstep.dev/index"]),
            name=name,
            uid=f"pod-{self._uids}",
            epoch=int(labels["everstep.dev/epoch"]),
            template=int(labels["everstep.dev/template"]),
            created=self.now,
            owner=self.job.metadata.uid,
            token_secret=find_token_secret(body["spec"]),  # type: ignore[arg-type]
            avoids=list_excluded_nodes(body["spec"]),  # type: ignore[arg-type]
            is_epoch_fixed=bool(find_token_secret(body["spec"])),  # type: ignore[arg-type]
        )

    # --- the cluster

    def bind(self) -> None:
        """The scheduler: pods get nodes while there is room."""
        taken = sum(1 for p in self.pods.values() if p.scheduled and p.ended is None)
        for name, pod in sorted(self.pods.items()):
            if pod.live and not pod.scheduled and taken < self.capacity:
                node = f"node-{taken}"
                while self._removed(node) or self._leaving(node) or node in pod.avoids:
                    node += "-new"
                self.pods[name] = dataclasses.replace(pod, scheduled_at=self.now, node=node)
                taken += 1
            elif pod.live and not pod.scheduled:
                self.pods[name] = dataclasses.replace(pod, unschedulable=pod.unschedulable or "0/9 nodes are available")

    def start(self) -> None:
        """The kubelets: bound pods get an address and a running container."""
        for name, pod in self.pods.items():
            if pod.live and pod.scheduled and pod.started_at is None:
                ip = f"10.0.{pod.index // 250}.{pod.index % 250}"
                self.pods[name] = dataclasses.replace(pod, started_at=self.now, ip=ip, phase="Running")

    def restart_operator(self) -> None:
        """Another process of it has no answer of the leader, and gets none before it has asked."""
        self.leader_reachable, self.answered_at, self.asked = False, None, None
        self.operator_since = self.now

    def bury(self) -> None:
        """Pods that were told to go are gone, where there is a kubelet to say so."""
        self.pods = {name: p for name, p in self.pods.items() if not p.deleting or self._removed(p.node)}

    def _removed(self, node: str | None) -> bool:
        """Return whether nothing of a node will be heard of again."""
        known = self.nodes.get(node) if node is not None else None
        return known is not None and (known.gone_since is not None or known.silent_since is not None)

    def _leaving(self, node: str) -> bool:
        """Return whether the scheduler keeps pods from a node that goes away."""
        known = self.nodes.get(node)
        return known is not None and known.signal is not None and known.signal.leaves

    def notice(self, index: int, signal: NodeSignal) -> str:
        """The node under this pod announces something; its name."""
        node = self.pods[f"{self.job.metadata.name}-{index}"].node
        assert node is not None
        self.nodes[node] = NodeView(node, signal=signal)
        return node

    def lead(self) -> None:
        """Run the leader in agent 0: start, fail or finish it as its pod does."""
        head = self.pods.get(f"{self.job.metadata.name}-0")
        if head is None or not head.running or (self.leader is not None and self.leader.uid != head.uid):
            if self.leader is not None and self.leader.phase == "running" and self.leader.outcome is None:
                self.broken += 1
            self.leader, self.answered_at = None, None
        if head is None or not head.running:
            return
        if self.leader is None:
            self.leader = SimulatedLeader(head.epoch, head.uid, self.job.spec.restart.application)
        leader, running = (
            self.leader,
            {
                p.uid: p
                for p in self.pods.values()
                if p.running and p.template == head.template and p.uid not in self.mute
            },
        )
        if leader.outcome is not None or head.uid in self.mute:
            return
        if leader.phase == "running" and any(uid not in running for uid in leader.members):
            index = next(
                (p.index for p in self.pods.values() if p.uid in leader.members and p.uid not in running), None
            )
            leader.end_generation("PodLost", self.now, index=index)
            self.broken += 1
        if leader.phase == "running" and leader.request_due is not None and self.now >= leader.request_due:
            leader.request_due = None
            self.save()
            leader.saved_step = self.checkpoint
        if leader.phase == "forming" and len(running) == self.job.spec.num_nodes and not head.deleting:
            leader.generation += 1
            leader.phase, leader.members, leader.started_at = "running", tuple(running), self.now
            leader.step = self.checkpoint

    def train(self, steps: int = 1) -> None:
        if self.leader is not None and self.leader.phase == "running" and self.leader.outcome is None:
            self.leader.step += steps

    def save(self) -> None:
        if self.leader is not None:
            self.checkpoint = max(self.checkpoint, self.leader.step)

    def tick(self, seconds: float = 1.0) -> None:
        """A while in which everything healthy takes its next step, so that an observer sees every stage."""
        self.now += seconds
        self.train()
        self.lead()
        self.start()
        self.bind()
        self.bury()

    # --- faults

    def fail_rank(self, exit_code: int = 1, cause: str = "Application") -> None:
        leader = self.leader
        if leader is None or leader.phase != "running" or leader.outcome is not None:
            return
        find_action = self.job.spec.restart.find_action
        action = find_action(exit_code) if cause == "Application" else ExitCodeAction.RETRY
        allowed = leader.left(find_action)
        leader.end_generation(cause, self.now, index=0, rank=0, exit_code=exit_code, message="ValueError: no")
        self.broken += 1
        if action is ExitCodeAction.FAIL or (action is ExitCodeAction.RETRY and allowed <= 0):
            self.end("failed", exit_code)

    def kill(self, index: int, *, reason: str = "Error", exit_code: int | None = 137) -> None:
        """A container dies without its agent's word."""
        self._end_pod(index, ContainerEnd(exit_code, 9, reason, "", self.now))

    def delete(self, index: int, *, disruption: str | None = None) -> None:
        name = f"{self.job.metadata.name}-{index}"
        if (pod := self.pods.get(name)) is not None and not pod.deleting:
            self.pods[name] = dataclasses.replace(pod, deleting_since=self.now, disruption=disruption)

    def remove_node(self, index: int) -> None:
        """The Node object under this pod is gone; its machine, and the pod's ranks, may go on."""
        pod = self.pods.get(f"{self.job.metadata.name}-{index}")
        if pod is not None and pod.node is not None:
            self.nodes[pod.node] = NodeView(pod.node, gone_since=self.now)

    def silence_node(self, index: int, *, lease: bool = True, agent: bool = True) -> None:
        """The machine under this pod is dead, or cut off: its kubelet renews no Lease, its agent sends no heartbeat."""
        pod = self.pods[f"{self.job.metadata.name}-{index}"]
        assert pod.node is not None
        if lease:
            self.nodes[pod.node] = NodeView(pod.node, silent_since=self.now)
        if agent:
            self.mute.add(pod.uid)

    def vanish(self, index: int) -> None:
        self.pods.pop(f"{self.job.metadata.name}-{index}", None)

    def end(self, result: str = "succeeded", exit_code: int = 0) -> None:
        """The leader declares the end, and all agents leave with their last word."""
        leader = self.leader
        if leader is None:
            return
        failure = leader.history[-1].id if result == "failed" else ""
        leader.outcome = LeaderOutcome(result, exit_code, "ValueError: no" if result == "failed" else "", failure)
        for pod in list(self.pods.values()):
            if pod.running:
                word = TerminationMessage(result, leader.epoch, leader.generation, exit_code=exit_code)
                self._end_pod(pod.index, ContainerEnd(exit_code, None, "Completed", "{}", self.now, word))

    def exit(self, index: int, exit_code: int, *, word: TerminationMessage | None = None, reason: str = "") -> None:
        """A container ends by itself."""
        reason = reason or ("Error" if exit_code else "Completed")
        self._end_pod(index, ContainerEnd(exit_code, None, reason, "", self.now, word))

    def _end_pod(self, index: int, end: ContainerEnd) -> None:
        name = f"{self.job.metadata.name}-{index}"
        pod = self.pods.get(name)
        if pod is not None and pod.ended is None and pod.started_at is not None:
            phase = "Running" if self.sidecars else "Failed" if end.exit_code else "Succeeded"
            self.pods[name] = dataclasses.replace(pod, ended=end, phase=phase)

    # --- how tests drive it

    @property
    def status(self) -> TrainingJobStatus:
        return self.job.status

    @property
    def phase(self) -> str:
        return str(self.job.status.phase or "")

    def run(self, *until: str, limit: float = 300.0, step: float = 1.0) -> Self:
        """Let healthy time pass, with a reconcile in each step, until the job is in one of these phases."""
        deadline = self.now + limit
        self.reconcile()
        while self.phase not in until:
            assert self.now < deadline, f"still {self.phase} after {limit} s: {self.status.conditions[:3]}"
            self.tick(step)
            self.reconcile()
        return self

    def edit(self, **fields: object) -> None:
        """The user changes the spec."""
        meta = self.job.metadata
        self.job = self.job.model_copy(
            update={
                "spec": self.job.spec.model_copy(update=fields),
                "metadata": meta.model_copy(update={"generation": meta.generation + 1}),
            }
        )
