"""An operator that has just started in the middle of a restart, to which every answer of the leader is the first."""

from __future__ import annotations

import pytest

from tests.plan.test_node_notices import SPOT, put_on_record, running, until_left


def test_an_operator_that_starts_before_the_leader_knows_of_a_lost_pod_does_not_take_the_ranks_for_running() -> None:
    world = running()
    world.notice(1, SPOT)
    put_on_record(world)
    until_left(world)
    world.reconcile()
    world.bury()
    world.reconcile()
    world.bind()
    world.start()
    assert world.phase == "Restarting"
    assert world.leader is not None
    assert world.leader.phase == "running", "of the generation that has just lost a pod"
    world.restart_operator()
    world.leader_reachable = True
    for _ in range(2):
        world.reconcile()
        assert world.phase == "Restarting"
    world.run("Running", limit=30)
    assert (world.status.restarts.total, world.status.restarts.preemption) == (1, 1)
    assert world.pods["digits-1"].node != "node-1"


@pytest.mark.parametrize("at", range(8))
def test_an_operator_that_starts_at_any_moment_of_a_restart_sees_its_end(at: int) -> None:
    world = running()
    world.notice(1, SPOT)
    put_on_record(world)
    until_left(world)
    for _ in range(at):
        world.tick()
        world.reconcile()
    world.restart_operator()
    world.leader_reachable = True
    world.run("Running", limit=60)
    world.run("Running", limit=1)
    assert world.pods["digits-1"].node != "node-1"
    assert (world.status.restarts.total, world.status.restarts.preemption) == (1, 1)
