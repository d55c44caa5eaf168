"""Pools are tried in order, each for its wait; a job that has run moves only if its checkpoints outlive its pods."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.status import ConditionType
from everstep_operator.cluster.job_memory import JobMemory
from everstep_operator.plan.observation import Observation
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.template import RejectedTemplate, resolve_template
from tests.builders import job, pool
from tests.plan.world import START, World

STORE = {"store": "s3://bucket/run"}


class QueuedWorld(World):
    """A world where a queue, while it is closed, keeps pods from the scheduler."""

    def __init__(self, built: TrainingJob) -> None:
        super().__init__(built, capacity=0)
        self.closed = True
        self.memory = JobMemory(built.metadata.uid)

    def bind(self) -> None:
        said = "Scheduling is blocked due to non-empty scheduling gates" if self.closed else "0/9 nodes are available"
        for name, pod in self.pods.items():
            if pod.live and not pod.scheduled:
                self.pods[name] = dataclasses.replace(pod, gated=self.closed, unschedulable=said)
        super().bind()

    def observe(self, **more: Any) -> Observation:
        gated_at = self.memory.note_gates(self.pods.values(), self.now)
        return dataclasses.replace(super().observe(**more), gated_at=gated_at)


def world(**pools: object) -> World:
    made = World(job().nodes(2).spot(wait="15m").build(), capacity=0)
    made.pools = {"spot": pool("spot").build(), "on-demand": pool("on-demand").build(), **pools}
    made.pools = {name: p for name, p in made.pools.items() if p is not None}
    return made


def chosen(made: World) -> str:
    assert made.status.template is not None
    return made.status.template.pool


def test_the_first_pool_is_tried_for_its_wait() -> None:
    made = world()
    made.reconcile()
    assert chosen(made) == "spot"
    made.now += 899
    assert made.reconcile().requeue_at is not None
    assert chosen(made) == "spot"
    made.now += 1
    made.reconcile()
    assert chosen(made) == "on-demand"
    assert made.status.transitions[-1].reason == "NextPool"
    made.capacity = 10
    made.run("Running")
    assert {p.template for p in made.pods.values()} == {2}


def test_while_a_queue_keeps_pods_from_the_scheduler_no_pool_lacks_nodes() -> None:
    """Pods with scheduling gates, as Kueue's, have not asked for a node: the wait begins when the gates are gone."""
    made = QueuedWorld(job().nodes(2).spot(wait="15m").build())
    made.pools = {"spot": pool("spot").build(), "on-demand": pool("on-demand").build()}
    made.reconcile()
    for _ in range(40):
        made.tick(100)
        made.reconcile()
    assert chosen(made) == "spot"
    assert not made.status.is_false(ConditionType.CAPACITY_AVAILABLE)
    made.closed = False
    opened = made.now
    while chosen(made) == "spot":
        made.tick(10)
        made.reconcile()
    assert made.now >= opened + 890, "the pool has had its wait"
    made.capacity = 10
    made.run("Running")


@pytest.mark.parametrize("seconds", [1, 119, 290])
def test_the_wait_begins_when_the_gates_are_gone_though_nobody_has_looked_since_long_before(seconds: float) -> None:
    """Nothing wakes a job that is queued: the look before may be as old as a resync, or the wait."""
    made = QueuedWorld(job().nodes(2).spot(wait="2m").build())
    made.pools = {"spot": pool("spot").build(), "on-demand": pool("on-demand").build()}
    made.reconcile()
    made.bind()
    made.reconcile()
    made.now += seconds
    made.closed = False
    made.bind()
    for passed, at in (("spot", 0), ("spot", 119), ("on-demand", 120)):
        made.now += at - (made.now - START - seconds)
        made.reconcile()
        assert chosen(made) == passed


def test_the_last_pool_is_kept() -> None:
    made = world(spot=None)
    made.reconcile()
    assert chosen(made) == "on-demand"
    made.now += 7200
    made.reconcile()
    assert chosen(made) == "on-demand"


def test_a_job_that_has_run_stays_in_its_pool() -> None:
    made = world()
    made.capacity = 2
    made.run("Running")
    made.capacity = 1
    made.vanish(1)
    for _ in range(50):
        made.tick(30)
        made.reconcile()
    assert chosen(made) == "spot"


def test_a_job_that_has_run_moves_when_its_pool_runs_out_if_its_checkpoints_are_elsewhere() -> None:
    made = World(job().nodes(2).spot(wait="15m").spec(checkpoint={"store": "s3://b/c"}).build(), capacity=2)
    made.pools = {"spot": pool("spot").build(), "on-demand": pool("on-demand").build()}
    made.run("Running")
    made.capacity = 1
    made.vanish(1)
    while made.phase == "Running":
        made.tick(1)
        made.reconcile()
    began = made.now
    while chosen(made) == "spot":
        assert made.now < began + 960
        made.tick(10)
        made.reconcile()
    assert made.now >= began + 890
    assert made.status.transitions[-1].reason == "NextPool"
    assert "'spot' had nodes for 1 of 2 pods" in made.status.conditions[0].message
    made.capacity = 2
    made.run("Running")
    assert {p.template for p in made.pods.values()} == {made.status.template.epoch} if made.status.template else False
    assert (made.status.restarts.infrastructure, made.status.restarts.application) == (1, 0), "the move costs nothing"
    made.capacity = 1
    made.vanish(1)
    for _ in range(100):
        made.tick(10)
        made.reconcile()
    assert chosen(made) == "spot", "the stockout there has passed, perhaps"


def test_a_job_whose_volume_ends_with_its_pods_stays_in_its_pool() -> None:
    volume: dict[str, Any] = {"volume": {"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}}
    made = World(job().nodes(2).spot(wait="15m").spec(checkpoint=volume).build(), capacity=2)
    made.pools = {"spot": pool("spot").build(), "on-demand": pool("on-demand").build()}
    made.run("Running")
    made.capacity = 1
    made.vanish(1)
    for _ in range(200):
        made.tick(10)
        made.reconcile()
    assert chosen(made) == "spot"


def test_a_pool_that_does_not_exist_is_waited_for() -> None:
    made = world(**{"spot": None, "on-demand": None})
    made.reconcile()
    assert made.phase == "Pending"
    assert made.status.transitions[-1].reason == "PoolNotFound"
    assert not made.pods
    made.pools = {"spot": pool("spot").build()}
    made.capacity = 2
    made.run("Running")


def test_a_pool_of_other_namespaces_is_passed_over() -> None:
    made = world(spot=pool("spot").spec(allowedNamespaces=["team-b"]).build())
    made.reconcile()
    assert chosen(made) == "on-demand"


def test_a_pool_that_is_not_there_yet_is_waited_for_when_the_other_refuses() -> None:
    closed = pool("spot").spec(allowedNamespaces=["team-b"]).build()
    made = world(**{"spot": closed, "on-demand": None})
    made.reconcile()
    assert made.phase == "Pending"
    assert made.status.transitions[-1].reason == "PoolNotFound"


def test_a_namespace_that_every_pool_refuses_is_refused_for_good() -> None:
    closed = pool("spot").spec(allowedNamespaces=["team-b"]).build()
    made = world(**{"spot": closed, "on-demand": closed})
    made.reconcile()
    assert made.phase == "Failed"
    assert made.status.transitions[-1].reason == "NamespaceNotAllowed"
    assert not made.pods


def test_pods_carry_the_capacity_type_of_the_pool_they_were_made_for() -> None:
    """From the frozen template: what is edited in the pool later does not reach them."""
    spot = pool("a100").spot().build()
    frozen = resolve_template(job().nodes(2).build(), epoch=1, pool=spot, plain=False, settings=PlanSettings())
    assert not isinstance(frozen, RejectedTemplate)
    assert build_pod(frozen, 1, 1)["metadata"]["labels"]["everstep.dev/capacity-type"] == "spot"
    without = resolve_template(job().nodes(2).build(), epoch=1, pool=None, plain=False, settings=PlanSettings())
    assert not isinstance(without, RejectedTemplate)
    assert "everstep.dev/capacity-type" not in build_pod(without, 1, 1)["metadata"]["labels"]


def test_a_pool_that_is_missing_at_a_resume_is_waited_for_however_often_it_is_looked_at() -> None:
    made = world()
    made.capacity = 2
    made.run("Running")
    made.edit(suspend=True)
    made.run("Suspended")
    there, made.pools = made.pools, {}
    made.edit(suspend=False)
    for _ in range(3):
        made.reconcile()
        assert made.phase == "Pending"
        assert made.status.transitions[-1].reason == "PoolNotFound"
        assert not made.pods
    made.pools = there
    made.run("Running")
    assert chosen(made) == "spot"


def test_without_its_pool_and_its_template_no_pod_is_made_for_any_node() -> None:
    made = world()
    made.capacity = 2
    made.run("Running")
    there, made.pools = made.pools, {}
    made.config_maps.clear()
    made.vanish(1)
    for _ in range(3):
        made.tick(30)
        made.reconcile()
        assert len(made.pods) == 1
    ready = next(each for each in made.status.conditions if each.type == "Stalled")
    assert "there is no TrainingPool 'spot'" in ready.message
    made.pools = there
    for _ in range(5):
        made.tick(30)
        made.reconcile()
    assert len(made.pods) == 2


def test_a_job_that_has_run_and_that_no_pool_allows_at_its_resume_waits_until_one_does() -> None:
    made = world()
    made.capacity = 2
    made.run("Running").tick(60)
    made.edit(suspend=True)
    made.run("Suspended")
    there = made.pools
    made.pools = {name: pool(name).spec(allowedNamespaces=["team-b"]).build() for name in there}
    made.edit(suspend=False)
    for _ in range(3):
        made.tick(60)
        made.reconcile()
        assert (made.phase, made.status.transitions[-1].reason) == ("Pending", "NamespaceNotAllowed")
        assert made.status.is_true(ConditionType.STALLED)
    made.pools = there
    made.run("Running")


def test_a_job_that_has_run_stays_where_it_is_if_its_template_is_allowed_no_more_when_its_pool_lacks_nodes() -> None:
    made = world()
    made.job = job().nodes(2).spot(wait="60s").pod(serviceAccountName="team").spec(checkpoint=STORE).build()
    made.settings, made.capacity = PlanSettings(service_accounts=frozenset({"team"})), 2
    made.run("Running")
    made.settings, made.capacity = PlanSettings(), 1
    made.vanish(1)
    for _ in range(5):
        made.tick(60)
        made.reconcile()
        assert (made.phase, chosen(made)) == ("Restarting", "spot")
    made.capacity = 2
    made.run("Running")
