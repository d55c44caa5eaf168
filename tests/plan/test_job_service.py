"""Names of pods in DNS: which pods have one, and when."""

from __future__ import annotations

import dataclasses

import pytest

from everstep_operator.plan.actions import EnsureService, NamePods
from tests.builders import job
from tests.plan.world import World


@pytest.mark.parametrize(("nodes", "begins_with"), [(4, {}), (5, {"everstep.dev/index": "0"})])
def test_pods_of_a_large_job_get_their_names_all_at_once(nodes: int, begins_with: dict[str, str]) -> None:
    """Each address that appears alone would be a write of an EndpointSlice with all that are in it."""
    world = World(job().nodes(nodes).build())
    everyone = {"everstep.dev/job": "digits"}
    (service,) = (each for each in world.reconcile().actions if isinstance(each, EnsureService))
    assert service.body["spec"]["selector"] == everyone | begins_with
    world.bind()
    world.start()
    last = f"digits-{nodes - 1}"
    started, world.pods[last] = world.pods[last], dataclasses.replace(world.pods[last], started_at=None, ip=None)
    assert not any(isinstance(each, NamePods) for each in world.reconcile().actions)
    world.pods[last] = started
    named = [each.body["spec"]["selector"] for each in world.reconcile().actions if isinstance(each, NamePods)]
    assert named == ([everyone] if begins_with else [])


def test_a_service_that_is_made_again_for_a_replacement_names_all_pods() -> None:
    world = World(job().nodes(8).build()).run("Running")
    del world.pods["digits-7"]
    (service,) = (each for each in world.reconcile().actions if isinstance(each, EnsureService))
    assert service.body["spec"]["selector"] == {"everstep.dev/job": "digits"}


def test_a_pod_that_has_ended_already_keeps_no_other_from_its_name() -> None:
    """In plain mode each container begins once its pod has, and one may end before the last one's image is there."""
    world = World(job().nodes(8).plain().build())
    world.reconcile()
    world.bind()
    late = world.pods.pop("digits-6")
    world.start()
    world.exit(7, 0)
    world.pods["digits-6"] = late
    assert not any(isinstance(each, NamePods) for each in world.reconcile().actions)
    world.start()
    assert any(isinstance(each, NamePods) for each in world.reconcile().actions)


def test_a_pod_that_is_lost_while_the_set_starts_gives_no_other_its_name() -> None:
    world = World(job().nodes(8).build())
    world.reconcile()
    world.bind()
    world.reconcile()
    del world.pods["digits-7"]
    (service,) = (each for each in world.reconcile().actions if isinstance(each, EnsureService))
    assert service.body["spec"]["selector"] == {"everstep.dev/job": "digits", "everstep.dev/index": "0"}
