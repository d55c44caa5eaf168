"""The planner as a whole: the life of a job, told through its phases."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from types import FrameType

import pytest
from yarl import URL

from everstep_operator.api.status import ConditionType
from everstep_operator.plan import JobPlan, make_plan
from everstep_operator.plan.actions import (
    Action,
    CreatePods,
    DeletePods,
    DryRun,
    EnsureSecret,
    EnsureService,
    EnsureTemplate,
    PushPeers,
)
from everstep_operator.plan.rejection import Rejection
from tests.builders import job
from tests.plan.world import START, World


def phases(world: World) -> list[str]:
    return [t.phase.value for t in world.status.transitions]


def test_a_job_goes_through_its_phases_with_one_write_and_one_event_each() -> None:
    world = World(job().nodes(10).build()).run("Running")
    world.tick()
    world.end()
    world.run("Succeeded")
    assert phases(world) == ["Scheduling", "Starting", "Running", "Succeeded"]
    assert len(world.statuses) == 4
    assert [e.reason for e in world.events] == ["Created", "Scheduled", "Running", "Completed"]
    assert world.requests <= 3.5 * 10, "the budget of requests per pod, deletes by the garbage collector aside"


def test_a_big_job_costs_little_more_than_a_request_per_pod() -> None:
    world = World(job().nodes(1000).build()).run("Running")
    world.end()
    world.run("Succeeded")
    assert world.requests <= 2.3 * 1000


def test_the_first_plan_makes_everything_in_order() -> None:
    made = make_plan(World(job().nodes(2).build()).observe(), 1.0)
    names = [type(a).__name__ for a in made.actions]
    assert names == ["DryRun", "EnsureService", "EnsureSecret", "EnsureAgent", "EnsureTemplate", "CreatePods"]
    assert made.status is not None
    assert made.status.epoch == 1, "on record before pod 0 exists"


def test_a_one_pod_job_needs_no_service() -> None:
    made = make_plan(World(job().build()).observe(), 1.0)
    assert "EnsureService" not in [type(a).__name__ for a in made.actions]


def test_what_has_not_changed_is_not_written() -> None:
    world = World(job().nodes(3).build()).run("Running")
    for _ in range(5):
        made = world.reconcile()
        assert not made.changed
        assert made.actions == ()


def count_calls(nodes: int) -> int:
    """Functions called by one look at a quiet job: what a busy machine or a slow one does not change."""
    world = World(job().nodes(nodes).build()).run("Running")
    seen = world.observe()
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        make_plan(seen, world.now)
    finally:
        sys.setprofile(None)
    return calls


def test_planning_quiet_pods_takes_a_few_calls_for_each() -> None:
    thousand, two_thousand = count_calls(1000), count_calls(2000)
    assert two_thousand - thousand < 40 * 1000, (thousand, two_thousand)


def test_a_job_of_another_controller_is_left_alone() -> None:
    world = World(job().spec(managedBy="kueue.x-k8s.io/multikueue").build())
    assert make_plan(world.observe(), world.now) == JobPlan()


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    world = World(job().deleted().build())
    assert make_plan(world.observe(), world.now) == JobPlan()


def test_finished_stays_finished() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.end()
    world.run("Succeeded")
    for index in range(2):
        world.vanish(index)
    world.edit(suspend=True)
    made = world.reconcile()
    assert world.phase == "Succeeded"
    assert made.actions == ()


def test_agents_are_reached_at_the_port_that_they_listen_on_though_the_operator_has_another_one_since() -> None:
    world = World(job().nodes(2).build())
    world.reconcile()
    world.bind()
    world.start()
    world.settings = dataclasses.replace(world.settings, agent_port=9000)
    made = world.reconcile()
    assert made.poll is not None
    assert made.poll.address == "10.0.0.0:8470"
    assert [a.addresses for a in made.actions if isinstance(a, PushPeers)] == [{0: "10.0.0.0:8470", 1: "10.0.0.1:8470"}]
    world.run("Running")
    world.vanish(1)
    assert [a.leader for a in world.reconcile().actions if isinstance(a, CreatePods)] == ["10.0.0.0:8470"]


def test_the_leader_hears_the_addresses_when_they_are_complete() -> None:
    world = World(job().nodes(2).build())
    world.reconcile()
    world.bind()
    world.start()
    made = world.reconcile()
    pushed = [a for a in made.actions if isinstance(a, PushPeers)]
    assert pushed == [PushPeers(1, {0: "10.0.0.0:8470", 1: "10.0.0.1:8470"})]
    world.tick()
    assert not [a for a in world.reconcile().actions if isinstance(a, PushPeers)], "all have joined"


def test_pods_that_have_ipv6_addresses_only_are_reached() -> None:
    world = World(job().nodes(2).build())
    world.reconcile()
    world.bind()
    world.start()
    world.pods = {name: dataclasses.replace(pod, ip=f"fd00::{pod.index + 1}") for name, pod in world.pods.items()}
    made = world.reconcile()
    pushed = [a for a in made.actions if isinstance(a, PushPeers)]
    assert pushed == [PushPeers(1, {0: "[fd00::1]:8470", 1: "[fd00::2]:8470"})]
    assert made.poll is not None
    url = URL(f"http://{made.poll.address}/v1/state")
    assert (url.host, url.port) == ("fd00::1", 8470)


@pytest.mark.parametrize(
    "said",
    [
        "Pod is invalid: spec.containers[0].image: Required value",
        'admission webhook "images" denied the request: tag not found',
    ],
)
def test_a_template_the_api_server_refuses_fails_the_job_with_its_words(said: str) -> None:
    world = World(job().nodes(2).build())
    world.refuse = lambda action: Rejection(action, "Invalid", said) if isinstance(action, DryRun) else None
    world.reconcile()
    assert world.phase == "Failed"
    failed = world.status.condition(ConditionType.FAILED)
    assert failed is not None
    assert (failed.reason, failed.message) == ("InvalidTemplate", said)
    assert not world.pods
    assert not world.config_maps


@pytest.mark.parametrize(
    "said",
    [
        'pods "digits-0" is forbidden: error looking up service account ml/sa: serviceaccount "sa" not found',
        'pods "digits-0" is forbidden: no PriorityClass with name high was found',
        'pods "digits-0" is forbidden: pod rejected: RuntimeClass "nvidia" not found',
        'pods "digits-0" is forbidden: error looking up service account ml/sa: etcdserver: request timed out',
        'pods "digits-0" is forbidden: insufficient quota to match these scopes: [{PriorityClass In [high]}]',
        'pods "digits-0" is forbidden: insufficient quota to consume: requests.nvidia.com/gpu',
    ],
)
def test_what_the_template_names_may_come_later_than_the_job(said: str) -> None:
    world = World(job().nodes(2).build())
    world.refuse = lambda action: Rejection(action, "Forbidden", said) if isinstance(action, DryRun) else None
    for _ in range(2):
        world.reconcile()
    stalled = world.status.condition(ConditionType.STALLED)
    assert world.phase == "Pending"
    assert stalled is not None
    assert (stalled.status, stalled.reason, stalled.message) == ("True", "AdmissionRejected", said)
    world.refuse = lambda _: None
    world.now += 31
    world.run("Running")


def test_a_policy_whose_parameters_come_later_than_the_job_is_waited_for() -> None:
    """The API server denies for it with 422, as if the pod were invalid."""
    said = (
        "pods \"digits-0\" is forbidden: ValidatingAdmissionPolicy 'limits' with binding 'limits' denied request: "
        "failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction"
    )
    world = World(job().nodes(2).build())
    world.refuse = lambda action: Rejection(action, "Invalid", said) if isinstance(action, DryRun) else None
    for _ in range(2):
        world.reconcile()
    stalled = world.status.condition(ConditionType.STALLED)
    assert world.phase == "Pending"
    assert stalled is not None
    assert (stalled.status, stalled.reason, stalled.message) == ("True", "AdmissionRejected", said)
    world.refuse = lambda _: None
    world.now += 31
    world.run("Running")


def test_a_job_in_a_new_namespace_does_not_wait_long_for_its_service_account() -> None:
    """Applied together, as many tools do; the account is there a moment later."""
    said = (
        'pods "digits-0" is forbidden: error looking up service account ml/default: serviceaccount "default" not found'
    )
    world = World(job().nodes(2).build())
    attempts: list[float] = []

    def refuse(action: Action) -> Rejection | None:
        if isinstance(action, DryRun):
            attempts.append(world.now - START)
        return Rejection(action, "Forbidden", said) if isinstance(action, DryRun) else None

    world.refuse = refuse
    for _ in range(200):
        world.reconcile()
        world.tick(0.5)
    assert attempts[1] <= 1.5
    assert all(after - before <= 30.5 for before, after in itertools.pairwise(attempts))
    assert len(attempts) < 12, "and less and less often"
    assert len(world.events) == 1, "once"


def test_a_policy_that_refuses_a_new_job_fails_it_and_one_that_has_run_waits() -> None:
    def refuse(action: Action) -> Rejection | None:
        said = 'admission webhook "no-big-pods" denied the request'
        return Rejection(action, "Forbidden", said) if isinstance(action, (DryRun, CreatePods)) else None

    new, old = World(job().nodes(2).build()), World(job().nodes(2).build()).run("Running")
    new.refuse = old.refuse = refuse
    new.reconcile()
    assert new.phase == "Failed"
    old.vanish(1)
    old.run("Restarting")
    old.reconcile()
    assert old.status.is_true(ConditionType.STALLED)
    old.refuse = lambda _: None
    old.now += 31
    old.run("Running")


@pytest.mark.parametrize(
    ("kind", "named"), [(EnsureService, "Service digits: "), (EnsureSecret, "Secret "), (EnsureTemplate, "ConfigMap ")]
)
def test_the_object_that_a_webhook_denies_is_named(kind: type, named: str) -> None:
    """The webhook tells of a rule alone, and a job has four kinds of objects."""
    world = World(job().nodes(2).build())
    said = 'admission webhook "labels" denied the request: no team'
    world.refuse = lambda action: Rejection(action, "Forbidden", said) if isinstance(action, kind) else None
    world.reconcile()
    message = world.status.conditions[0].message
    assert message.startswith(named), message
    assert message.endswith(said)


@pytest.mark.parametrize("phase", ["Starting", "Running"])
@pytest.mark.parametrize("kind", ["Invalid", "Forbidden", "Webhook"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_webhook_that_rejects_replacements_ends_no_job(phase: str, kind: str, index: int) -> None:
    """Whatever code it answers with: the first pods were accepted, so the template is right."""
    said = 'admission webhook "images" denied the request: unsigned'
    world = World(job().nodes(2).build()).run(phase)
    world.refuse = lambda action: Rejection(action, kind, said) if isinstance(action, (DryRun, CreatePods)) else None
    world.vanish(index)
    for _ in range(8):
        world.tick(31)
        world.reconcile()
    stalled = world.status.condition(ConditionType.STALLED)
    assert stalled is not None
    assert (stalled.status, stalled.message) == ("True", said)
    assert stalled.reason == "AdmissionRejected", "it is not the operator that does not permit it"
    told = [event for event in world.events if event.reason == stalled.reason]
    assert [(event.type, event.message) for event in told] == [("Warning", said)], "once"
    world.refuse = lambda _: None
    world.now += 31
    world.run("Running")
    assert not world.status.is_true(ConditionType.STALLED)


def test_a_new_job_waits_for_a_webhook_that_is_unavailable() -> None:
    said = 'failed calling webhook "images": context deadline exceeded'
    world = World(job().nodes(2).timeouts(pending="10m").build())
    world.refuse = lambda action: (
        Rejection(action, "Webhook", said) if isinstance(action, (DryRun, CreatePods)) else None
    )
    world.reconcile()
    assert world.phase == "Pending"
    stalled = world.status.condition(ConditionType.STALLED)
    assert stalled is not None
    assert (stalled.status, stalled.reason, stalled.message) == ("True", "AdmissionRejected", said)
    world.refuse = lambda _: None
    world.now += 31
    world.run("Running")


def test_a_job_whose_replacements_are_rejected_for_long_gives_its_nodes_back_and_waits() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.refuse = lambda action: (
        Rejection(action, "Forbidden", "no") if isinstance(action, (DryRun, CreatePods)) else None
    )
    world.vanish(1)
    for _ in range(100):
        world.tick(10)
        world.reconcile()
    assert (world.phase, world.status.transitions[-1].reason) == ("Pending", "AdmissionRejected")
    assert not world.pods
    world.refuse = lambda _: None
    world.run("Running")
    assert world.status.restarts.total == 1


@pytest.mark.parametrize("kind", ["Invalid", "Forbidden", "Webhook"])
def test_a_webhook_that_is_down_for_days_ends_no_job_and_leaves_its_history(kind: str) -> None:
    """`timeouts.pending` is for capacity; it counts again from when the pods are accepted."""
    world = World(job().nodes(2).timeouts(pending="1h", startup="10m").build()).run("Running")
    before = phases(world)
    world.refuse = lambda action: Rejection(action, kind, "no") if isinstance(action, (DryRun, CreatePods)) else None
    world.vanish(1)
    for _ in range(600):
        world.tick(300)
        world.reconcile()
    assert phases(world)[: len(before)] == before
    assert len(world.status.transitions) <= len(before) + 8
    world.refuse, world.capacity = lambda _: None, 0
    for _ in range(10):
        world.tick(300)
        world.reconcile()
    assert world.phase in ("Scheduling", "Pending", "Restarting")
    world.capacity = 2
    world.run("Running", limit=3600)


def test_a_lost_template_that_is_no_longer_allowed_ends_no_running_job() -> None:
    """Its ConfigMap was deleted, and the operator's lists are shorter than they were."""
    world = World(job().nodes(2).pod(priorityClassName="high").build()).run("Running")
    allowed, world.settings = world.settings, dataclasses.replace(world.settings, priority_classes=frozenset())
    world.config_maps.clear()
    world.vanish(1)
    for _ in range(3):
        world.tick(31)
        world.reconcile()
    assert world.phase == "Restarting"
    assert world.status.is_true(ConditionType.STALLED)
    world.settings = allowed
    world.now += 31
    world.run("Running")


def test_a_used_up_quota_is_waited_for() -> None:
    world = World(job().nodes(2).build())
    world.refuse = lambda action: (
        Rejection(action, "Quota", "exceeded quota") if isinstance(action, CreatePods) else None
    )
    world.reconcile()
    assert world.phase == "Pending"
    assert world.status.transitions[-1].reason == "QuotaExceeded"
    made = world.reconcile()
    assert not made.actions, "events do not make it try more often"
    assert made.requeue_at == world.now + 30
    world.refuse = lambda _: None
    world.now += 31
    world.run("Running")


def test_retries_of_a_quota_leave_one_line_and_one_event() -> None:
    world = World(job().nodes(2).build())
    world.refuse = lambda action: (
        Rejection(action, "Quota", "exceeded quota") if isinstance(action, CreatePods) else None
    )
    for _ in range(20):
        world.reconcile()
        world.now += 31
    assert len(world.status.transitions) <= 4
    assert [event.reason for event in world.events].count("QuotaExceeded") == 1
    assert world.status.timings.pending > 300


def test_a_foreign_object_of_our_name_stalls_the_job() -> None:
    world = World(job().nodes(2).build())
    taken = "Service digits belongs to Deployment web"
    world.refuse = lambda action: (
        Rejection(action, "Conflict", taken) if type(action).__name__ == "EnsureService" else None
    )
    world.reconcile()
    assert world.status.is_true(ConditionType.STALLED)
    world.refuse = lambda _: None
    world.now += 31
    world.run("Running")
    assert not world.status.is_true(ConditionType.STALLED)


def test_foreign_pods_are_never_touched() -> None:
    world = World(job().nodes(1).build()).run("Running")
    foreign = next(iter(world.pods.values()))
    world.pods["digits-7"] = type(foreign)(
        index=7, name="digits-7", uid="x", epoch=1, template=1, created=world.now, owner="another job"
    )
    assert not [a for a in world.reconcile().actions if isinstance(a, DeletePods)]


def test_an_operator_that_has_just_started_knows_of_no_silence() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.now += 500
    world.restart_operator()
    made = world.reconcile()
    assert not made.changed
    assert made.requeue_at == world.now + 15, "unless it hears nothing for so long"
    world.now += 15
    world.reconcile()
    assert world.status.is_true(ConditionType.DEGRADED)


def test_a_silent_leader_degrades_the_job_to_pod_status() -> None:
    world = World(job().nodes(2).build())
    world.leader_reachable = False
    world.run("Running", limit=40)
    assert world.status.is_true(ConditionType.DEGRADED)
    ready = world.status.condition(ConditionType.READY)
    assert ready is not None
    assert ready.message == "all pods run; nobody tells of their ranks"
    world.leader_reachable = True
    world.reconcile()
    assert not world.status.is_true(ConditionType.DEGRADED)
