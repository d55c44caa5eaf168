"""CRDs are newer than the operator: it keeps what runs, and resolves nothing from a spec that it does not know."""

from __future__ import annotations

from typing import Any

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.status import TrainingJobStatus
from tests.builders import job, pool
from tests.plan.world import World


def upgrade_crds(world: World) -> None:
    """Newer CRDs give the job a field."""
    manifest = world.job.manifest()
    manifest["spec"]["later"] = "default"
    world.job = TrainingJob.parse_stored(manifest)
    assert world.job.unknown_fields == ("spec.later",)


def upgrade_operator(world: World) -> None:
    """An operator that knows the field."""
    world.job = TrainingJob.parse(world.job.manifest())


def running(**spec: object) -> World:
    return World(job().nodes(2).spec(**spec).build()).run("Running")


def reason(world: World) -> str:
    stalled = next(c for c in world.status.conditions if c.type == "Stalled")
    return stalled.reason if stalled.status == "True" else ""


def test_a_new_job_waits_for_the_operator_that_knows_its_fields_for_as_long_as_it_takes() -> None:
    world = World(job().nodes(2).timeouts(pending="5m").build())
    upgrade_crds(world)
    for _ in range(20):
        world.reconcile()
        world.tick(60)
    assert (world.phase, reason(world)) == ("Pending", "UnknownFields")
    assert "spec.later" in world.status.conditions[0].message
    assert world.pods == {}
    upgrade_operator(world)
    world.run("Running")


def test_a_job_that_runs_goes_on_and_its_lost_pods_are_replaced() -> None:
    world = running()
    upgrade_crds(world)
    for index in (1, 0):
        world.delete(index)
        world.run("Restarting")
        world.run("Running")
    assert world.status.restarts.infrastructure == 2
    world.end()
    world.tick()
    world.reconcile()
    assert world.phase == "Succeeded"


def test_a_job_that_a_newer_operator_has_started_is_not_started_anew_by_an_older_one() -> None:
    """Its hash counts fields that this operator leaves out."""
    world = running()
    template = world.status.template
    assert template is not None
    status = world.status.model_copy(update={"template": template.model_copy(update={"spec_hash": "0" * 16})})
    world.job = world.job.model_copy(update={"status": TrainingJobStatus.parse(status.manifest())})
    upgrade_crds(world)
    pods = dict(world.pods)
    for _ in range(5):
        world.tick()
        world.reconcile()
    assert (world.phase, world.pods) == ("Running", pods)


def test_a_job_whose_template_is_lost_gets_no_pod_until_it_can_be_resolved() -> None:
    world = running()
    upgrade_crds(world)
    world.config_maps.clear()
    world.delete(1)
    world.run("Restarting")
    for _ in range(20):
        world.tick(10)
        world.reconcile()
    assert sorted(world.pods) == ["digits-0"]
    assert reason(world) == "UnknownFields"
    upgrade_operator(world)
    world.run("Running")


def test_a_job_that_is_resumed_waits_and_begins_with_all_that_it_says() -> None:
    world = running()
    world.edit(suspend=True)
    world.run("Suspended")
    world.edit(suspend=False)
    upgrade_crds(world)
    for _ in range(5):
        world.reconcile()
        world.tick()
    assert (world.phase, reason(world), world.pods) == ("Pending", "UnknownFields", {})
    upgrade_operator(world)
    world.run("Running")
    assert world.status.template is not None
    assert world.status.template.epoch == 2


def test_a_pool_with_fields_that_nobody_knows_is_waited_for_and_not_said_to_be_missing() -> None:
    manifest: dict[str, Any] = pool("a100").manifest()
    manifest["spec"]["later"] = 1
    world = World(job().nodes(2).pool("a100").pool("closed").build())
    world.pools = {
        "a100": TrainingPool.parse_stored(manifest),
        "closed": pool("closed").namespaces("others").build(),
    }
    for _ in range(3):
        world.reconcile()
        world.tick()
    assert (world.phase, reason(world), world.pods) == ("Pending", "UnknownFields", {})
    assert "spec.later" in world.status.conditions[0].message
    del manifest["spec"]["later"]
    world.pools["a100"] = TrainingPool.parse_stored(manifest)
    world.run("Running")
    assert world.status.template is not None
    assert world.status.template.pool == "a100"
