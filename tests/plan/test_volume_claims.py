"""A claim that one node can mount at a time is warned of before it costs anything."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from everstep_operator.api.status import ConditionType
from everstep_operator.plan.observation import Observation
from everstep_operator.plan.volume_claims import list_claim_names
from tests.builders import JobBuilder, job
from tests.plan.world import World


class ClaimWorld(World):
    """A world with PersistentVolumeClaims: their access modes by name."""

    def __init__(self, built: JobBuilder, **claims: tuple[str, ...]) -> None:
        super().__init__(built.build())
        self.claims = claims

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
