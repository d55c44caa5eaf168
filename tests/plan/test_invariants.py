"""Invariants that hold whatever fails: the real planner against a cluster in which anything may fail at any moment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase, TrainingJobStatus
from everstep_operator.plan.actions import Action, CreatePods
from everstep_operator.plan.node_signals import NodeSignal
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import GangView, PodView
from everstep_operator.plan.rejection import Rejection
from tests.builders import job, pool
from tests.plan.world import START, OperatorDied, World

NODES = st.integers(0, 3)
SIGNALS = [
    NodeSignal(Reason.SPOT_INTERRUPTION, "taint spot-itn", 120),
    NodeSignal(Reason.SCALE_DOWN, "taint disrupted", 10),
    NodeSignal(Reason.NODE_DRAINING, "cordoned"),
]


class Chaos(RuleBasedStateMachine):
    """Random faults, then peace: the job must end as it would have without the faults."""

    world: World
    seen: int
    old_pods: dict[str, PodView]
    last: TrainingJobStatus | None

    @initialize(
        nodes=st.integers(1, 4), plain=st.booleans(), runs=st.booleans(), strict=st.booleans(), pools=st.booleans()
    )
    def start(self, nodes: int, plain: bool, runs: bool, strict: bool, pools: bool) -> None:
        # Budgets are not what this is about, and every fault costs one.
        builder = (
            job()
            .nodes(nodes)
            .restart(application=1000, infrastructure=1000, fencing="strict" if strict else "checkpoint")
            .restart(onExitCodes=[{"codes": [75], "action": "Ignore"}], resetAfter="60s")
        )
        if pools:  # a stockout of one moves the job to the other, and back
            builder = builder.spot(wait="60s").spec(checkpoint={"store": "s3://bucket/run"})
        self.world = World((builder.plain() if plain else builder).build())
        self.world.pools = {name: pool(name).build() for name in ("spot", "on-demand")} if pools else {}
        self.old_pods, self.seen, self.last = {}, 0, None
        if runs:
            self.world.run("Running")

    # --- the operator, whole and broken

    @rule()
    def reconcile(self) -> None:
        self.world.reconcile()

    @rule(step=st.integers(0, 8))
    def reconcile_and_die(self, step: int) -> None:
        with suppress(OperatorDied):
            self.world.reconcile(die_after=step)

    @rule()
    def remember_pods(self) -> None:
        self.old_pods = dict(self.world.pods)

    @rule()
    def reconcile_with_a_late_cache(self) -> None:
        """The watch is behind, but what the operator has created is in the cache from the create's own answer."""
        late = dict(self.old_pods)
        for name, pod in self.world.pods.items():
            if name not in late or late[name].uid != pod.uid:
                late[name] = replace(pod, scheduled_at=None, started_at=None, ip=None, ended=None, deleting_since=None)
        self.world.reconcile(pods=late)

    @rule(twice=st.booleans())
    def lose_sight_of_the_leader(self, twice: bool) -> None:
        self.world.leader_reachable = twice

    # --- time and the cluster

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 40.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(part=st.sampled_from(["bury", "bind", "start", "lead", "train", "save"]))
    def one_step(self, part: str) -> None:
        act: Callable[[], None] = getattr(self.world, part)
        act()

    # --- faults

    @rule(index=NODES, reason=st.sampled_from(["Error", "OOMKilled"]))
    def kill(self, index: int, reason: str) -> None:
        self.world.kill(index, reason=reason)

    @rule(index=NODES, disruption=st.sampled_from([None, "EvictionByEvictionAPI", "PreemptionByScheduler"]))
    def delete(self, index: int, disruption: str | None) -> None:
        self.world.delete(index, disruption=disruption)

    @rule(index=NODES)
    def vanish(self, index: int) -> None:
        self.world.vanish(index)

    @rule(index=NODES)
    def remove_node(self, index: int) -> None:
        self.world.remove_node(index)

    @rule(index=NODES, signal=st.sampled_from(SIGNALS), saves=st.booleans())
    def notice(self, index: int, signal: NodeSignal, saves: bool) -> None:
        pod = self.world.pods.get(f"{self.world.job.metadata.name}-{index}")
        self.world.saves_in = 2.0 if saves else None
        if pod is not None and pod.node is not None and pod.node not in self.world.nodes:
            self.world.notice(index, signal)

    @rule()
    def return_nodes(self) -> None:
        self.world.nodes.clear()
        self.world.mute.clear()

    @rule(index=NODES, lease=st.booleans(), agent=st.booleans(), unknown=st.booleans())
    def silence_node(self, index: int, lease: bool, agent: bool, unknown: bool) -> None:
        """Its kubelet, its agent or both are not heard; Kubernetes has noticed, or not."""
        pod = self.world.pods.get(f"digits-{index}")
        if pod is None or pod.node is None:
            return
        self.world.silence_node(index, lease=lease, agent=agent)
        if lease and unknown:
            node = self.world.nodes[pod.node]
            self.world.nodes[pod.node] = replace(node, ready=False, not_ready_because="NodeStatusUnknown")

    @rule(index=NODES)
    def renew_lease(self, index: int) -> None:
        pod = self.world.pods.get(f"digits-{index}")
        if pod is not None and pod.node is not None:
            self.world.nodes[pod.node] = NodeView(pod.node, renewed_at=self.world.now)

    @rule()
    def restart_operator(self) -> None:
        self.world.restart_operator()
        self.world.leader_reachable = True

    @rule(newer=st.booleans())
    def change_crds(self, newer: bool) -> None:
        """Newer ones give each job a field that the operator does not know."""
        manifest = self.world.job.manifest()
        manifest["spec"] |= {"later": 1} if newer else {}
        self.world.job = TrainingJob.parse_stored(manifest)

    @rule(index=NODES, code=st.sampled_from([0, 1, 120, 127]))
    def exit(self, index: int, code: int) -> None:
        self.world.exit(index, code)

    @rule(capacity=st.integers(0, 4), rival=st.booleans())
    def crowd(self, capacity: int, rival: bool) -> None:
        older = GangView("default/older", "a", START - 100, frozenset(), wanted=4)
        self.world.capacity, self.world.gangs = capacity, (older,) if rival else ()

    @rule(kind=st.sampled_from(["Quota", "Conflict", "Invalid", "Forbidden", "Webhook", ""]))
    def refuse_pods(self, kind: str) -> None:
        def refuse(action: Action) -> Rejection | None:
            lasting = kind in ("Invalid", "Forbidden") and self.world.led == 0  # which rightly fails a new job
            return Rejection(action, kind, "no") if kind and not lasting and isinstance(action, CreatePods) else None

        self.world.refuse = refuse

    @rule(code=st.sampled_from([1, 75]))
    def fail_rank(self, code: int) -> None:
        self.world.fail_rank(code)

    @rule(index=NODES, bad=st.booleans())
    def suspect_node(self, index: int, bad: bool) -> None:
        """Jobs have failed on it before, as the record says."""
        pod = self.world.pods.get(f"digits-{index}")
        if pod is not None and pod.node is not None:
            self.world.avoided_nodes = (pod.node,) if bad else ()

    @precondition(lambda self: self.world.status.phase is not None and not self.world.status.phase.finished)
    @rule(value=st.booleans())
    def suspend(self, value: bool) -> None:
        self.world.edit(suspend=value)

    # --- what holds

    @invariant()
    def nothing_goes_back(self) -> None:
        if not hasattr(self, "world"):
            return
        for status in self.world.statuses[self.seen :]:
            old, self.last = self.last, status
            if old is None:
                continue
            assert not (old.phase and old.phase.finished), "finished stays finished"
            assert (status.epoch, status.generation) >= (old.epoch, old.generation)
            assert status.restarts.total >= old.restarts.total
            ids = [c.id for c in status.restarts.charges]
            assert len(ids) == len(set(ids)), "charged twice"
            if old.template and status.template:
                assert status.template.epoch >= old.template.epoch
            if old.progress and status.progress and (status.epoch, status.generation) == (old.epoch, old.generation):
                assert status.progress.step >= old.progress.step
        self.seen = len(self.world.statuses)

    @invariant()
    def no_restart_is_charged_twice(self) -> None:
        if hasattr(self, "world") and not self.plain:
            assert self.world.status.restarts.total <= self.world.broken + self.pending_break()

    @property
    def plain(self) -> bool:
        template = self.world.status.template
        return self.world.job.spec.command is None or (template is not None and template.plain)

    def pending_break(self) -> int:
        """A generation that has just lost its leader or a pod, and whose end nobody has counted yet."""
        leader = self.world.leader
        return 1 if leader is not None and leader.phase == "running" else 0

    @invariant()
    def no_pod_is_from_the_future(self) -> None:
        if hasattr(self, "world"):
            assert all(p.epoch <= self.world.status.epoch for p in self.world.pods.values())

    def teardown(self) -> None:
        """No more faults: it converges to the outcome that it would have reached anyway."""
        if not hasattr(self, "world"):
            return
        phase = self.world.status.phase
        if phase is not None and phase.finished:
            if self.world.status.transitions[-1].reason == "StartFailed":
                return  # five in a row: the faults looked like an agent that cannot start
            # Only a plain set can end by itself here, when all its containers happen to exit with 0.
            assert phase is Phase.SUCCEEDED, self.world.status
            assert self.plain
            return
        self.world.capacity, self.world.gangs, self.world.refuse = 100, (), lambda _: None
        self.world.avoided_nodes = ()
        self.world.leader_reachable = True
        self.world.mute.clear()
        self.world.nodes = {name: node for name, node in self.world.nodes.items() if node.gone_since is not None}
        self.change_crds(newer=False)
        if self.world.job.spec.suspend:
            self.world.run("Suspended")
            assert not self.world.pods
            self.world.edit(suspend=False)
        self.world.run("Running", "Succeeded", limit=400)  # a plain set may have ended before anybody looked
        if self.plain:
            for index in range(self.world.job.spec.num_nodes):
                self.world.exit(index, 0)
        else:
            self.world.end()
        self.world.run("Succeeded")
        self.nothing_goes_back()


TestChaos = Chaos.TestCase
TestChaos.settings = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))
