"""Suspension gives everything back and keeps the job."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from everstep_operator.api.job import Timeouts, TrainingJob, TrainingJobSpec
from everstep_operator.api.status import ConditionType
from everstep_operator.plan import make_plan
from everstep_operator.plan.actions import Action, CreatePods, DeletePods, DeleteStaleObjects
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.rejection import Rejection
from tests.builders import job
from tests.plan.world import World


def test_a_suspended_job_gives_everything_back() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.edit(suspend=True)
    world.reconcile()
    assert world.phase == "Stopping"
    assert all(p.deleting for p in world.pods.values())
    world.bury()
    made = world.reconcile()
    assert world.phase == "Suspended"
    assert world.status.is_true(ConditionType.SUSPENDED)
    assert world.status.nodes == 0
    assert DeleteStaleObjects(2) in made.actions


def test_a_suspension_whose_deletions_a_policy_denies_says_so_until_they_are_allowed() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.edit(suspend=True)
    (deletion,) = [a for a in make_plan(world.observe(), world.now).actions if isinstance(a, DeletePods)]

    def carry_out(rejection: Rejection | None) -> list[DeletePods]:
        made = make_plan(world.observe(rejection=rejection), world.now)
        if made.changed and made.status is not None:
            world._write(made.status)
        return [a for a in made.actions if isinstance(a, DeletePods)]

    carry_out(None)
    carry_out(Rejection(deletion, "Forbidden", "pods are precious"))
    stalled = world.status.condition(ConditionType.STALLED)
    assert world.phase == "Stopping"
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", "Suspended")
    assert "pods are precious" in stalled.message
    writes = len(world.statuses)
    assert carry_out(None), "it is tried again"
    carry_out(Rejection(deletion, "Forbidden", "pods are precious"))
    assert len(world.statuses) == writes, "which changes nothing"
    world.reconcile()
    world.reconcile()
    assert not world.status.is_true(ConditionType.STALLED)
    world.bury()
    world.reconcile()
    assert world.phase == "Suspended"


def test_a_failure_after_a_resume_that_waits_is_no_end_though_the_cache_is_behind() -> None:
    """Its ranks were told to stop, whatever they say of it; the newer CRDs alone keep it from starting again."""
    world = World(job().restart(application=3).build()).run("Running")
    before = dict(world.pods)
    world.edit(suspend=True)
    world.reconcile()
    world.job = TrainingJob.parse_stored({**world.job.manifest(), "spec": {**world.job.manifest()["spec"], "later": 1}})
    world.edit(suspend=False)
    world.exit(0, 0)
    world.reconcile()
    assert (world.phase, world.status.transitions[-1].reason) == ("Pending", "UnknownFields")
    world.fail_rank()
    world.reconcile(pods=before)
    assert world.phase == "Pending"
    world.job = TrainingJob.parse(
        {**world.job.manifest(), "spec": {k: v for k, v in world.job.manifest()["spec"].items() if k != "later"}}
    )
    world.run("Running")


@pytest.mark.parametrize("result", ["succeeded", "failed"])
def test_a_job_that_has_ended_in_the_same_look_is_not_trained_again(result: str) -> None:
    world = World(job().nodes(3).restart(application=0).build()).run("Running")
    world.fail_rank() if result == "failed" else world.end()
    world.edit(suspend=True)
    world.reconcile()
    assert world.phase == result.capitalize()
    world.edit(suspend=False)
    for _ in range(3):
        world.tick(60)
        made = world.reconcile()
        assert not [a for a in made.actions if isinstance(a, CreatePods)]
    assert world.phase == result.capitalize()


@pytest.mark.parametrize("resumed", [False, True])
def test_success_while_it_stops_for_a_suspension_is_success(resumed: bool) -> None:
    """The leader says so: it tells ranks that have ended from ranks that were stopped."""
    world = World(job().nodes(3).build()).run("Running")
    world.edit(suspend=True)
    world.reconcile()
    assert world.phase == "Stopping"
    world.end()
    if resumed:
        world.edit(suspend=False)
    world.reconcile()
    assert world.phase == "Succeeded"


def test_plain_containers_that_end_well_are_success_only_if_nobody_stopped_them() -> None:
    done, stopped = World(job().plain().build()).run("Running"), World(job().plain().build()).run("Running")
    done.exit(0, 0)
    for world in (done, stopped):
        world.edit(suspend=True)
        world.reconcile()
    stopped.exit(0, 0)  # at the signal
    stopped.reconcile()
    assert (done.phase, stopped.phase) == ("Succeeded", "Stopping")
    stopped.bury()
    stopped.reconcile()
    assert stopped.phase == "Suspended"


def test_suspension_is_no_failure() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.edit(suspend=True)
    world.run("Suspended")
    assert world.status.restarts.total == 0


def test_resuming_resolves_the_edited_job_under_a_new_template() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.edit(suspend=True)
    world.run("Suspended")
    world.edit(num_nodes=2)
    world.edit(suspend=False)
    made = world.reconcile()
    assert [a.indices for a in made.actions if isinstance(a, CreatePods)] == [(0, 1)]
    assert world.status.template is not None
    assert world.status.template.epoch == world.status.epoch == 2
    assert not world.status.is_true(ConditionType.SUSPENDED)
    world.run("Running")


def test_a_resume_waits_for_the_old_pods() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.edit(suspend=True)
    world.reconcile()
    world.edit(suspend=False, image="example.com/trainer:2")
    made = world.reconcile()
    assert not [a for a in made.actions if isinstance(a, CreatePods)]
    assert world.phase == "Pending"
    world.run("Running")
    assert {p.template for p in world.pods.values()} == {2}


@pytest.mark.parametrize("edit", [{"num_nodes": 2}, {"num_nodes": 4}, {"command": ["python", "other.py"]}])
def test_a_suspension_that_nobody_saw_still_resolves_the_edited_job(edit: dict[str, Any]) -> None:
    world = World(job().nodes(3).build()).run("Running")
    for change in ({"suspend": True}, edit, {"suspend": False}):
        world.edit(**change)
    made = world.reconcile()
    assert world.phase == "Pending"
    assert made.poll is not None, "its pods stop with their grace, and their leader may save"
    assert all(pod.deleting for pod in world.pods.values())
    world.run("Running")
    assert {pod.template for pod in world.pods.values()} == {2}
    assert len(world.pods) == world.job.spec.num_nodes
    assert world.status.restarts.total == 0
    assert not world.reconcile().changed


def test_what_may_change_at_any_moment_restarts_nothing() -> None:
    world = World(job().nodes(3).build()).run("Running")
    before = {pod.uid for pod in world.pods.values()}
    budget = world.job.spec.restart.model_copy(update={"application": 7})
    world.edit(restart=budget, timeouts=Timeouts(runtime=timedelta(hours=1)), ttl_after_finished=timedelta(hours=1))
    world.reconcile()
    assert {pod.uid for pod in world.pods.values() if pod.live} == before


def test_a_job_that_an_older_operator_resolved_is_left_alone() -> None:
    world = World(job().nodes(3).build()).run("Running")
    assert world.status.template is not None
    unhashed = world.status.template.model_copy(update={"spec_hash": ""})
    world.job = world.job.model_copy(update={"status": world.status.model_copy(update={"template": unhashed})})
    world.edit(image="example.com/trainer:2")
    assert world.reconcile().actions == ()
    assert world.phase == "Running"


def test_a_job_born_suspended_makes_nothing() -> None:
    world = World(job().suspended().build())
    made = world.reconcile()
    assert world.phase == "Suspended"
    assert made.actions == ()


def test_a_leader_is_renewed_until_its_pod_is_gone() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.edit(suspend=True)
    assert world.reconcile().poll is not None, (
        "unrenewed, it could not publish a last checkpoint after the fence timeout"
    )
    world.bury()
    assert world.run("Suspended").reconcile().poll is None


def test_defaults_that_the_api_server_writes_out_are_no_change() -> None:
    spec = {"image": "example.com/trainer:1"}
    written = {"numNodes": 1, "distribution": {"torch": {}}, "restart": {"application": 9, "fencing": "checkpoint"}}
    assert TrainingJobSpec.parse(spec | written).pods_hash() == TrainingJobSpec.parse(spec).pods_hash()
    changes: list[dict[str, Any]] = [{"distribution": {"mpi": {}}}, {"restart": {"maxBackoff": "1s"}}, {"args": ["x"]}]
    for change in changes:
        assert TrainingJobSpec.parse(spec | change).pods_hash() != TrainingJobSpec.parse(spec).pods_hash(), change


def test_another_order_of_containers_or_volumes_is_no_change() -> None:
    """The API server takes it for none, and lets it through while the job runs."""
    over: dict[str, list[dict[str, Any]]] = {
        "containers": [{"name": "trainer"}, {"name": "logs", "image": "x"}],
        "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}],
    }
    turned = {kind: items[::-1] for kind, items in over.items()}
    world = World(job().nodes(2).pod(**over).build()).run("Running")
    template = world.status.template
    assert template is not None
    spec = job().nodes(2).pod(**over).build().spec
    for generation, known in enumerate((template.spec_hash, spec.legacy_pods_hash()), 2):
        status = world.status.model_copy(update={"template": template.model_copy(update={"spec_hash": known})})
        world.job = job().nodes(2).pod(**over).meta(generation=generation).build().model_copy(update={"status": status})
        assert world.reconcile().actions == (), "as an operator of this or the former version has left it"
    status = world.status.model_copy(update={"template": template})
    world.job = job().nodes(2).pod(**turned).meta(generation=4).build().model_copy(update={"status": status})
    assert world.reconcile().actions == ()
    assert world.phase == "Running"


def test_another_order_of_claims_is_no_change() -> None:
    """The API server takes it for none, and lets it through while the job runs."""
    claims = [{"name": "gpus"}, {"name": "nics", "request": "fast"}]

    def build(*given: dict[str, str]) -> TrainingJob:
        return job().nodes(2).spec(resources={"claims": [*given]}).meta(generation=2).build()

    world = World(job().nodes(2).spec(resources={"claims": claims}).build()).run("Running")
    world.job = build(*claims[::-1]).model_copy(update={"status": world.status})
    world.reconcile()
    assert world.phase == "Running"
    assert not any(pod.deleting for pod in world.pods.values())
    assert build(claims[0]).spec.pods_hash() != build(*claims).spec.pods_hash()


@pytest.mark.parametrize("edited", [False, True])
def test_a_job_that_has_run_and_is_allowed_no_more_at_its_resume_waits_and_can_be_corrected(edited: bool) -> None:
    """Whoever runs the operator has shortened its list of service accounts, or the template names a wrong one."""
    allowed = PlanSettings(service_accounts=frozenset({"team"}))
    world = World(job().nodes(2).pod(serviceAccountName="team").build())
    world.settings = allowed
    world.run("Running").tick(60)
    world.edit(suspend=True)
    world.run("Suspended")
    if edited:
        world.edit(pod_template=job().pod(serviceAccountName="tema").build().spec.pod_template)
    else:
        world.settings = PlanSettings()
    world.edit(suspend=False)
    for _ in range(3):
        world.tick(60)
        world.reconcile()
        assert (world.phase, world.status.transitions[-1].reason) == ("Pending", "NotPermitted")
        assert world.status.is_true(ConditionType.STALLED)
        assert not world.pods
    if edited:
        world.edit(suspend=True)
        world.run("Suspended")
        world.edit(suspend=False, pod_template=job().pod(serviceAccountName="team").build().spec.pod_template)
    world.settings = allowed
    world.run("Running")


def test_a_job_that_waits_and_whose_template_is_lost_and_allowed_no_more_goes_on_waiting() -> None:
    world = World(job().nodes(2).pod(serviceAccountName="team").build())
    world.settings = PlanSettings(service_accounts=frozenset({"team"}))
    world.refuse = lambda action: Rejection(action, "Quota", "exceeded quota") if is_set_made(action) else None
    world.reconcile()
    assert (world.phase, world.status.transitions[-1].reason) == ("Pending", "QuotaExceeded")
    world.settings = PlanSettings()
    world.config_maps.clear()
    for _ in range(5):
        world.tick(60)
        world.reconcile()
        assert world.phase == "Pending"
    world.settings, world.refuse = PlanSettings(service_accounts=frozenset({"team"})), lambda _: None
    world.run("Running")


def is_set_made(action: Action) -> bool:
    return isinstance(action, CreatePods)
