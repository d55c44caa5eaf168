"""Sets of pods: given back whole, made again whole, two at a time when there is room for one."""

from __future__ import annotations

import dataclasses
import random
from datetime import timedelta

import pytest

from everstep_operator.plan import gang
from everstep_operator.plan.actions import CreatePods, DeletePods, DryRun
from everstep_operator.plan.observation import GangView
from everstep_operator.plan.rejection import Rejection
from tests.builders import CREATED, job
from tests.plan.world import START, World

OLDER = GangView("default/older", "a", START - 100, frozenset(), wanted=4, scheduled=1)


def partly_placed() -> World:
    world = World(job().nodes(4).build(), capacity=2)
    world.gangs = (OLDER,)
    for _ in range(3):
        world.tick()
        world.reconcile()
    assert world.phase == "Scheduling"
    return world


def test_a_stalled_set_is_given_back_as_a_whole() -> None:
    world = partly_placed()
    world.now += gang.STALL_SECONDS
    made = world.reconcile()
    assert world.phase == "Pending"
    assert world.status.transitions[-1].reason == "GangReleased"
    (action,) = [a for a in made.actions if isinstance(a, DeletePods)]
    assert len(action.pods) == 4


def test_pods_to_which_the_scheduler_has_not_come_yet_are_not_given_back() -> None:
    """Behind ten thousand others they wait for minutes, and who gives nodes back then waits for as long again."""
    world = partly_placed()
    untried = {name: pod for name, pod in world.pods.items() if not pod.scheduled}
    world.pods |= {name: dataclasses.replace(pod, unschedulable="") for name, pod in untried.items()}
    end = world.now + gang.UNTRIED_SECONDS
    while world.now < end:
        looked_again = world.reconcile().requeue_at
        assert world.phase == "Scheduling"
        assert looked_again is not None
        world.now = looked_again
    world.now = end + gang.STALL_SECONDS
    world.reconcile()
    assert world.phase == "Pending", "no scheduler ever comes to them"


def test_nodes_that_are_being_made_are_waited_for_and_asked_about_only_before_a_release() -> None:
    world = partly_placed()
    world.scale_up_at = world.now
    assert world.asked_for_room == 0
    world.now += gang.STALL_SECONDS
    made = world.reconcile()
    assert world.phase == "Scheduling"
    assert world.asked_for_room == 1
    assert made.requeue_at == world.scale_up_at + gang.SCALE_UP_SECONDS
    world.now = made.requeue_at
    world.reconcile()
    assert world.phase == "Pending", "the promise was not kept"
    world.reconcile()
    assert world.asked_for_room == 2, "what is decided is not asked about"


def test_a_release_is_finished_by_the_next_operator() -> None:
    world = partly_placed()
    before = dict(world.pods)
    world.now += gang.STALL_SECONDS
    world.reconcile()
    world.pods = before  # killed between the status write and the deletes
    world.reconcile()
    assert all(p.deleting for p in world.pods.values())


def test_it_is_made_again_whole_once_the_older_has_its_nodes() -> None:
    world = partly_placed()
    world.now += gang.STALL_SECONDS
    world.reconcile()
    world.bury()
    world.capacity = 10
    assert not [a for a in world.reconcile().actions if isinstance(a, CreatePods)], "the older comes first"
    world.gangs = ()
    world.now += gang.BACKOFF_SECONDS_ALONE
    made = world.reconcile()
    assert [a.indices for a in made.actions if isinstance(a, CreatePods)] == [(0, 1, 2, 3)]
    assert world.phase == "Scheduling"
    world.run("Running")
    assert world.status.template is not None
    assert world.status.template.epoch == 1, "the same template"
    assert world.status.epoch == 2, "another leader"


def test_nothing_is_made_while_pods_of_the_old_set_still_stop() -> None:
    world = partly_placed()
    world.gangs = ()
    world.now += gang.STALL_SECONDS_ALONE
    world.reconcile()
    del world.pods["digits-3"]
    world.now += gang.BACKOFF_SECONDS_ALONE
    assert not [a for a in world.reconcile().actions if isinstance(a, CreatePods)]


DENIED = 'admission webhook "policy" denied the request'


@pytest.mark.parametrize("kind", ["Forbidden", "Invalid"])
def test_a_released_set_that_is_denied_is_tried_again_though_its_template_is_gone(kind: str) -> None:
    """Its pods were accepted once; that they are not now is no fault of the template."""
    world = partly_placed()
    world.now += gang.STALL_SECONDS
    world.reconcile()
    world.bury()
    world.gangs = ()
    world.config_maps.clear()
    world.refuse = lambda action: Rejection(action, kind, DENIED) if isinstance(action, DryRun) else None
    for _ in range(40):
        world.now += 60
        world.reconcile()
    assert world.phase == "Pending"
    assert DENIED in world.status.conditions[0].message
    world.refuse = lambda action: None
    world.capacity = 4
    world.now += 60
    world.reconcile()
    world.run("Running")


def test_a_set_that_was_placed_and_lost_is_tried_again_though_its_template_is_gone() -> None:
    world = World(job().nodes(4).build())
    world.reconcile()
    world.tick()
    world.reconcile()
    assert world.phase == "Starting"
    world.config_maps.clear()
    world.pods.clear()
    world.refuse = lambda action: Rejection(action, "Forbidden", DENIED) if isinstance(action, DryRun) else None
    for _ in range(5):
        world.now += 10
        world.reconcile()
    assert world.phase == "Pending"


def test_a_first_set_that_is_denied_after_a_quota_let_it_pass_no_more_is_tried_again() -> None:
    """Quotas are judged last: all that comes before has accepted the pods."""
    world = World(job().nodes(4).build())
    world.refuse = lambda action: Rejection(action, "Quota", "exceeded quota") if isinstance(action, DryRun) else None
    world.reconcile()
    world.refuse = lambda action: Rejection(action, "Forbidden", DENIED) if isinstance(action, DryRun) else None
    world.now += 60
    world.reconcile()
    assert world.phase == "Pending"


@pytest.mark.parametrize("seed", range(5))
def test_two_jobs_that_do_not_fit_together_both_finish(seed: int) -> None:
    rng, capacity = random.Random(seed), 6
    old = World(job("old").nodes(4).build())
    young = World(job("young").nodes(5).created(CREATED + timedelta(seconds=1)).build(), now=START + 1)
    worlds = [old, young]
    deadline = START + 3600
    while not all(w.phase == "Succeeded" for w in worlds):
        now = max(w.now for w in worlds) + 2
        assert now < deadline, [(w.phase, len(w.pods)) for w in worlds]
        for w in worlds:
            w.now = now
            w.train()
            w.lead()
            w.start()
            w.bury()
        waiting = [(w, n) for w in worlds for n, p in w.pods.items() if p.live and not p.scheduled]
        rng.shuffle(waiting)
        taken = sum(1 for w in worlds for p in w.pods.values() if p.scheduled and p.ended is None)
        for w, name in waiting[: capacity - taken]:
            w.pods[name] = dataclasses.replace(w.pods[name], scheduled_at=now, node="n")
        rng.shuffle(worlds)
        for w in worlds:
            others = [o for o in worlds if o is not w and gang.is_waiting(o.job)]
            w.gangs = tuple(gang.make_gang_view(o.job, o.pods.values()) for o in others)
            w.reconcile()
            if w.phase == "Running" and w.leader is not None and w.leader.step > 20:
                w.end()
    first, second = (next(t.start for t in w.status.transitions if t.phase == "Running") for w in (old, young))
    assert first < second
