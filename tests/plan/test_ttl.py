"""After the end logs stay, stragglers go, and so does the job when it was asked to."""

from __future__ import annotations

from datetime import timedelta

import pytest

from everstep_operator.api.job import Timeouts
from everstep_operator.plan.actions import DeleteJob, DeletePods
from everstep_operator.plan.leader_view import LeaderOutcome
from tests.builders import job
from tests.plan.world import World


def finished(ttl: str | None = None) -> World:
    builder = job().nodes(2)
    world = World((builder.ttl(ttl) if ttl else builder).build()).run("Running")
    world.end()
    return world.run("Succeeded")


def test_ended_pods_are_kept_for_their_logs() -> None:
    world = finished()
    world.now += 1e6
    made = world.reconcile()
    assert made.actions == ()
    assert made.requeue_at is None
    assert len(world.pods) == 2


@pytest.mark.parametrize(("grace", "seconds"), [(None, 120), (600, 600), (15, 30)])
def test_a_pod_that_does_not_leave_is_deleted_after_the_grace_in_which_it_may_store_what_was_saved_last(
    grace: int | None, seconds: int
) -> None:
    spec = {} if grace is None else {"terminationGracePeriodSeconds": grace}
    world = World(job().nodes(2).pod(**spec).build()).run("Running")
    assert world.leader is not None
    kept = world.pods["digits-1"]
    world.end()
    world.pods["digits-1"] = kept
    world.run("Succeeded")
    made = world.reconcile()
    assert made.actions == ()
    assert made.requeue_at == world.now + seconds
    world.now += seconds
    (action,) = world.reconcile().actions
    assert isinstance(action, DeletePods)
    assert [ref.name for ref in action.pods] == ["digits-1"]


def test_the_leader_of_a_job_that_has_succeeded_is_polled_until_its_agent_has_ended() -> None:
    """A leader that nobody renews is fenced, and its node publishes nothing more of what was saved last."""
    world = World(job().nodes(2).build()).run("Running")
    assert world.leader is not None
    world.leader.outcome = LeaderOutcome("succeeded", 0)
    world.run("Succeeded")
    for _ in range(2):
        assert world.reconcile().poll is not None
    world.exit(0, 0)
    assert world.reconcile().poll is None


def test_a_sidecar_does_not_hold_the_node_of_a_finished_job() -> None:
    world = World(job().nodes(2).build()).run("Running")
    world.sidecars = True
    world.end()
    world.run("Succeeded")
    assert world.reconcile().requeue_at == world.now + 30, "sidecars may have something to send"
    world.now += 30
    (action,) = world.reconcile().actions
    assert isinstance(action, DeletePods)
    assert [ref.name for ref in action.pods] == ["digits-0", "digits-1"]
    world.bury()
    assert world.reconcile().actions == ()


def test_the_job_goes_when_its_time_has_passed() -> None:
    world = finished("1h")
    assert world.reconcile().requeue_at == world.now + 3600
    world.now += 3600
    assert world.reconcile().actions == (DeleteJob("uid-default-digits"),)


def test_a_finished_job_that_is_edited_has_a_status_of_this_edit() -> None:
    world = finished()
    before = world.status
    world.edit(timeouts=Timeouts(runtime=timedelta(days=3)), suspend=True)
    made = world.reconcile()
    assert (world.status.observed_generation, world.phase) == (2, "Succeeded")
    assert {each.observed_generation for each in world.status.conditions} == {2}
    assert world.status.transitions == before.transitions
    assert made.actions == ()
    assert not world.reconcile().changed
