"""A claim that one node can mount at a time is warned of before it costs anything."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from everstep_operator.api.status import ConditionType
from everstep_operator.plan.actions import Action, DeletePods, MarkOutOfService
from everstep_operator.plan.observation import Observation
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.volume_claims import list_claim_names
from tests.builders import JobBuilder, job
from tests.plan.world import World


class ClaimWorld(World):
    """A world with PersistentVolumeClaims: their access modes by name."""

    def __init__(self, built: JobBuilder, **claims: tuple[str, ...]) -> None:
        super().__init__(built.build())
        self.claims = claims
        self.acted: list[Action] = []

    def _act(self, action: Action) -> None:
        self.acted.append(action)
        super()._act(action)

    def observe(self, **fields: Any) -> Observation:
        observed = super().observe(**fields)
        return dataclasses.replace(observed, claims=self.claims if observed.frozen is not None else {})


def told(world: World) -> str:
    found = world.status.condition(ConditionType.VOLUMES_SHARED)
    return f"{found.status}/{found.reason}: {found.message}" if found is not None else ""


def warnings(world: World) -> list[str]:
    return [event.message for event in world.events if (event.type, event.reason) == ("Warning", "ReadWriteOnce")]


def test_several_nodes_and_a_claim_of_one() -> None:
    world = ClaimWorld(job().nodes(3), data=("ReadWriteOnce",))
    world.reconcile()
    world.reconcile()
    assert told(world) == (
        "False/ReadWriteOnce: PersistentVolumeClaim 'data' is ReadWriteOnce: pods on different nodes cannot mount it "
        "together, and the job has 3: those that lack it do not start. Use ReadWriteMany, or an object store, or set "
        "numNodes to 1"
    )
    world.run("Running")
    assert len(warnings(world)) == 1, "once"


def test_one_node_and_a_claim_that_a_lost_node_holds() -> None:
    world = ClaimWorld(job(), data=("ReadWriteOnce",), more=("ReadWriteOncePod",)).run("Running")
    assert "'data' is ReadWriteOnce, 'more' is ReadWriteOncePod: after its node is lost" in told(world)
    assert "6 minutes at the earliest" in warnings(world)[0]


@pytest.mark.parametrize("modes", [("ReadWriteMany",), ("ReadWriteOnce", "ReadWriteMany"), ("ReadOnlyMany",), ()])
def test_a_claim_that_nodes_share_or_of_which_nothing_is_known_is_nothing_to_warn_of(modes: tuple[str, ...]) -> None:
    world = ClaimWorld(job().nodes(2), data=modes).run("Running")
    assert told(world) == ""
    assert warnings(world) == []


def test_another_claim_at_a_resume_ends_the_warning() -> None:
    world = ClaimWorld(job().nodes(2), data=("ReadWriteOnce",)).run("Running")
    world.claims = {"data": ("ReadWriteMany",)}
    world.tick(40)
    world.reconcile()
    assert told(world) == "True/VolumesShared: "


def test_all_volumes_of_the_pods_count() -> None:
    volumes = [{"name": "a", "persistentVolumeClaim": {"claimName": "x"}}, {"name": "b", "emptyDir": {}}]
    again = {"name": "c", "persistentVolumeClaim": {"claimName": "x"}}
    assert list_claim_names({"spec": {"volumes": [*volumes, again]}}) == ("x",)
    assert list_claim_names({}) == ()


RWO, RWX = ("ReadWriteOnce",), ("ReadWriteMany",)


def lose_a_node(world: ClaimWorld) -> list[Action]:
    """The machine of pod 1 dies; return what is done until its pod runs elsewhere."""
    world.run("Running")
    world.acted.clear()
    world.silence_node(1)
    for _ in range(120):
        world.tick()
        world.reconcile()
    assert world.pods["digits-1"].node != "node-1"
    return [a for a in world.acted if isinstance(a, MarkOutOfService | DeletePods)]


@pytest.mark.parametrize(("modes", "allowed", "marked"), [(RWO, True, 1), (RWO, False, 0), (RWX, True, 0)])
def test_a_dead_node_is_marked_before_its_pods_go_where_that_is_allowed_and_needed(
    modes: tuple[str, ...], allowed: bool, marked: int
) -> None:
    world = ClaimWorld(job().nodes(3), data=modes)
    world.settings = PlanSettings(out_of_service_taint=allowed)
    done = lose_a_node(world)
    assert [a for a in done if isinstance(a, MarkOutOfService)] == [MarkOutOfService("node-1")] * marked
    forced = next(a for a in done if isinstance(a, DeletePods) and a.pods[0].grace_seconds == 0)
    assert not marked or done.index(MarkOutOfService("node-1")) < done.index(forced)


def test_a_removed_node_cannot_be_marked() -> None:
    world = ClaimWorld(job().nodes(3), data=RWO)
    world.settings = PlanSettings(out_of_service_taint=True)
    world.run("Running")
    world.remove_node(1)
    for _ in range(60):
        world.tick()
        world.reconcile()
    assert [a for a in world.acted if isinstance(a, MarkOutOfService)] == []


def test_where_volumes_are_detached_at_once_a_job_of_one_node_is_not_warned() -> None:
    world = ClaimWorld(job(), data=RWO)
    world.settings = PlanSettings(out_of_service_taint=True)
    world.run("Running")
    assert told(world) == ""
