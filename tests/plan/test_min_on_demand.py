"""The first `minOnDemand` pods are in an on-demand pool in any case, the others where the job prefers."""

from __future__ import annotations

from typing import Any

import pytest

from everstep_operator.api.status import ConditionType
from everstep_operator.plan.actions import DryRun
from everstep_operator.plan.mixed_pools import resolve_for_pools
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.template import RejectedTemplate, build_config_map, read_frozen_template
from tests.builders import JobBuilder, job, pool
from tests.plan.pooled_world import PooledWorld

KEY = b"key"


def built(least: int, nodes: int = 4, **spec: Any) -> JobBuilder:
    return job().nodes(nodes).pool("spot", "15m").pool("demand", "20m").spec(minOnDemand=least, **spec)


def pools_in_use(world: PooledWorld) -> tuple[str, ...]:
    assert world.status.template is not None
    return world.status.template.pools


def pass_time(world: PooledWorld, seconds: float, step: float = 10.0) -> None:
    for _ in range(int(seconds / step)):
        world.tick(step)
        world.reconcile()


def message(world: PooledWorld) -> str:
    found = world.status.condition(ConditionType.CAPACITY_AVAILABLE)
    assert found is not None
    return f"{found.status}: {found.message}"


@pytest.mark.parametrize(
    ("least", "placed"),
    [
        (0, ["spot"] * 4),
        (1, ["demand", "spot", "spot", "spot"]),
        (3, ["demand", "demand", "demand", "spot"]),
        (4, ["demand"] * 4),
    ],
)
def test_pods_begin_with_those_on_demand(least: int, placed: list[str]) -> None:
    world = PooledWorld(built(least).build(), {"spot": 9, "demand": 9}).run("Running")
    assert world.placed() == placed
    labels = [build_pod_labels(world, index) for index in range(4)]
    assert [{"spot": "spot", "demand": "on-demand"}[name] for name in placed] == labels


def test_crds_that_lose_the_field_under_a_running_job_stop_nothing() -> None:
    """Somebody installs older ones: the API server drops the field of what it reads, and nobody has edited the job."""
    world = PooledWorld(built(1).build(), {"spot": 9, "demand": 9}).run("Running")
    before = dict(world.pods)
    spec = world.job.spec
    world.job = world.job.model_copy(update={"spec": spec.model_copy(update={"min_on_demand": 0})})
    pass_time(world, 60)
    assert world.phase == "Running"
    assert world.pods.keys() == before.keys()
    assert {pod.uid for pod in world.pods.values()} == {pod.uid for pod in before.values()}
    world.job = world.job.model_copy(update={"spec": spec})
    pass_time(world, 60)
    assert {pod.uid for pod in world.pods.values()} == {pod.uid for pod in before.values()}


def build_pod_labels(world: PooledWorld, index: int) -> str:
    frozen = world.observe().frozen
    assert frozen is not None
    return str(build_pod(frozen, index, 1)["metadata"]["labels"]["everstep.dev/capacity-type"])


def test_a_preferred_pool_on_demand_needs_no_second_one() -> None:
    world = PooledWorld(
        job().nodes(2).pool("demand").pool("spot").spec(minOnDemand=1).build(), {"demand": 9, "spot": 9}
    )
    world.run("Running")
    assert pools_in_use(world) == ("demand",)


def test_replacements_stay_in_the_pool_of_their_index() -> None:
    world = PooledWorld(built(2).build(), {"spot": 9, "demand": 9}).run("Running")
    for index in (0, 1, 2, 3):
        world.vanish(index)
        pass_time(world, 60, 1.0)
        assert world.phase == "Running"
        assert world.placed() == ["demand", "demand", "spot", "spot"]


def test_a_stockout_of_spot_is_named_and_moves_all_on_demand() -> None:
    world = PooledWorld(built(1).build(), {"spot": 1, "demand": 9})
    pass_time(world, 60)
    assert message(world) == "False: TrainingPool 'spot' (spot) has nodes for 1 of 3 pods: 0/9 nodes are available"
    world.run("Running", limit=1200, step=10.0)
    assert world.placed() == ["demand"] * 4
    assert pools_in_use(world) == ("demand",)
    assert message(world) == "True: "
    moved = next(event.message for event in world.events if event.reason == "NextPool")
    assert moved == "TrainingPool 'spot' had nodes for 1 of 3 pods; 'demand' is the next pool to try"


def test_a_stockout_on_demand_moves_the_first_pods_alone() -> None:
    made = built(1).pool("more-demand").build()
    world = PooledWorld(made, {"spot": 9, "demand": 0, "more-demand": 9})
    pass_time(world, 60)
    assert message(world).startswith("False: TrainingPool 'demand' (on-demand) has nodes for 0 of 1 pods: ")
    world.run("Running", limit=1500, step=10.0)
    assert world.placed() == ["more-demand", "spot", "spot", "spot"]
    assert pools_in_use(world) == ("spot", "more-demand")


def test_a_job_that_has_run_moves_the_part_that_lacks_nodes_if_its_checkpoints_are_elsewhere() -> None:
    world = PooledWorld(built(1, checkpoint={"store": "s3://b/c"}).build(), {"spot": 3, "demand": 9}).run("Running")
    world.room["spot"] = 2
    world.vanish(3)
    world.reconcile()
    pass_time(world, 120)
    assert "TrainingPool 'spot' (spot) has nodes for 2 of 3 pods" in message(world), "also while it restarts"
    world.run("Running", limit=1500, step=10.0)
    assert world.placed() == ["demand"] * 4


def test_a_job_whose_pools_are_all_spot_fails_at_once_and_says_what_to_do() -> None:
    world = PooledWorld(
        job().nodes(2).pool("spot").pool("spot-b").spec(minOnDemand=1).build(), {"spot": 1, "spot-b": 1}
    )
    world.reconcile()
    assert (world.phase, world.status.transitions[-1].reason) == ("Failed", "NoOnDemandPool")
    assert world.status.conditions[0].message == (
        "minOnDemand is 1, and none of the TrainingPools spot, spot-b has capacityType on-demand"
    )
    assert not world.pods


def test_a_pool_on_demand_that_does_not_exist_yet_is_waited_for() -> None:
    world = PooledWorld(built(1).build(), {"spot": 9})
    world.reconcile()
    assert (world.phase, world.status.transitions[-1].reason) == ("Pending", "PoolNotFound")
    world.pools["demand"] = pool("demand").build()
    world.room["demand"] = 1
    world.run("Running")
    assert world.placed() == ["demand", "spot", "spot", "spot"]


def test_a_lost_template_is_resolved_for_both_pools_again() -> None:
    world = PooledWorld(built(1).build(), {"spot": 9, "demand": 9}).run("Running")
    world.config_maps.clear()
    world.vanish(0)
    world.vanish(2)
    world.reconcile()
    world.run("Running", limit=120)
    assert world.placed() == ["demand", "spot", "spot", "spot"]


def test_the_stored_template_keeps_both_parts_and_is_signed_as_a_whole() -> None:
    made = built(1).build()
    frozen = resolve_for_pools(
        made, epoch=1, pool=pool("spot").spot().build(), on_demand=pool("demand").build(), plain=False,
        settings=PlanSettings(operator_key=KEY),
    )  # fmt: skip
    assert not isinstance(frozen, RejectedTemplate)
    stored = build_config_map(made, frozen, KEY)
    where: dict[str, Any] = {"namespace": "default", "uid": made.metadata.uid, "epoch": 1, "keys": [KEY]}
    assert read_frozen_template(stored, **where) == frozen
    forged = {
        **stored,
        "data": {**stored["data"], "on-demand.json": stored["data"]["on-demand.json"].replace("1", "3")},
    }
    assert read_frozen_template(forged, **where) is None
    del stored["data"]["on-demand.json"]
    assert read_frozen_template(stored, **where) is None


def test_pools_that_count_gpus_by_other_names_are_told_apart() -> None:
    spot = pool("spot").spot().spec(gpuResource="nvidia.com/mig-1g.5gb").build()
    several = {"nvidia.com/gpu": 2, "nvidia.com/mig-1g.5gb": 4}

    def resolve(**spec: Any) -> Any:
        made = built(1, **spec).resources(limits=several).build()  # type: ignore[arg-type]
        return resolve_for_pools(
            made, epoch=1, pool=spot, on_demand=pool("demand").build(), plain=False, settings=PlanSettings()
        )

    rejected = resolve()
    assert isinstance(rejected, RejectedTemplate)
    assert "4 in TrainingPool 'spot', 2 in 'demand'" in rejected.message
    assert not isinstance(resolve(numProcPerNode=2), RejectedTemplate)


def test_both_parts_of_a_set_are_judged_before_anything_is_made() -> None:
    world = PooledWorld(built(1).build(), {"spot": 9, "demand": 9})
    made = world.reconcile()
    selectors = [a.body["spec"]["nodeSelector"] for a in made.actions if isinstance(a, DryRun)]
    assert selectors == [{"pool": "demand"}, {"pool": "spot"}]
