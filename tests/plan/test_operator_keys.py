"""Operator keys are rotated under running jobs: a set of pods goes by one key from its first pod to its last."""

from __future__ import annotations

import dataclasses

import pytest

from everstep_operator.plan.actions import Action, EnsureSecret, EnsureTemplate
from everstep_operator.plan.operator_keys import find_key, make_secret_name
from tests.builders import job
from tests.plan.world import World

OLD, NEW = b"o" * 32, b"n" * 32


def rotated(world: World) -> World:
    world.settings = dataclasses.replace(world.settings, operator_key=NEW, previous_keys=(OLD,))
    world.restart_operator()
    return world


def running() -> World:
    world = World(job().nodes(2).build())
    world.settings = dataclasses.replace(world.settings, operator_key=OLD)
    return world.run("Running")


def names(world: World, epoch: int, key: bytes) -> str:
    return make_secret_name("digits", world.job.metadata.uid, epoch, key)


def noted(world: World) -> list[Action]:
    """Return a list that collects the requests to the API server from now on."""
    seen: list[Action] = []

    def note(action: Action) -> None:
        seen.append(action)

    world.refuse = note
    return seen


@pytest.mark.parametrize("lost", ["pod", "pod and template"])
def test_a_replacement_goes_by_the_key_of_the_pods_beside_it(lost: str) -> None:
    """Its template too: whoever resolved it anew by the new key would give it a token that no other agent has."""
    world = running()
    before = dict(world.config_maps)
    rotated(world)
    if lost == "pod and template":
        world.config_maps.clear()
    world.vanish(1)
    seen = noted(world)
    world.run("Running")
    assert {pod.token_secret for pod in world.pods.values()} == {names(world, 1, OLD)}
    assert {action.name for action in seen if isinstance(action, EnsureSecret)} == {names(world, 1, OLD)}
    assert [action.body for action in seen if isinstance(action, EnsureTemplate)] == [*before.values()]
    assert world.last is not None
    assert world.last.poll is not None
    assert world.last.poll.token_secret == names(world, 1, OLD)


def test_a_new_set_goes_by_the_new_key() -> None:
    world = rotated(running())
    for suspended in (True, False):
        world.job = world.job.model_copy(update={"spec": world.job.spec.model_copy(update={"suspend": suspended})})
        world.run("Suspended" if suspended else "Running")
    assert world.status.template is not None
    epoch = world.status.template.epoch
    assert epoch > 1
    assert {pod.token_secret for pod in world.pods.values()} == {names(world, epoch, NEW)}


def test_without_the_previous_key_a_template_of_it_is_lost_and_its_pods_stay() -> None:
    world = running()
    before = dict(world.pods)
    world.settings = dataclasses.replace(world.settings, operator_key=NEW, previous_keys=())
    world.restart_operator()
    world.tick()
    world.reconcile()
    assert {name: pod.uid for name, pod in world.pods.items()} == {name: pod.uid for name, pod in before.items()}
    assert world.observe().frozen is None


def test_what_no_key_gives_is_taken_for_the_current_one() -> None:
    assert find_key(["database", ""], "digits", "u", 1, (NEW, OLD)) == NEW
    assert find_key([make_secret_name("digits", "u", 1, OLD)], "digits", "u", 1, (NEW, OLD)) == OLD
    assert find_key([make_secret_name("digits", "another", 1, OLD)], "digits", "u", 1, (NEW, OLD)) == NEW
