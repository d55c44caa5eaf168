"""A time that a node announces for its end, and that passes while it stays: labels tell when maintenance may begin."""

from __future__ import annotations

import dataclasses
from functools import partial

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import ConditionType
from everstep_operator.plan.node_notices import OVERDUE_SECONDS
from everstep_operator.plan.node_signals import NodeSignal
from tests.plan.test_node_notices import NOTICE, pass_time, put_on_record, running, until_left
from tests.plan.world import World


def bind_to(world: World, names: set[str]) -> None:
    """The scheduler, where there are no other nodes than these, each for one pod, and none has a taint."""
    for name, pod in sorted(world.pods.items()):
        free = sorted(names - {p.node for p in world.pods.values() if p.ended is None} - pod.avoids)
        if pod.live and not pod.scheduled and free:
            world.pods[name] = dataclasses.replace(pod, scheduled_at=world.now, node=free[0])


def test_a_time_that_has_passed_long_ago_announces_nothing_of_a_node_that_is_ready() -> None:
    world = running()
    signal = NodeSignal(Reason.NODE_MAINTENANCE, "label", deadline=world.now - OVERDUE_SECONDS - 1)
    node = world.notice(1, signal)
    pass_time(world, 120)
    assert world.phase == "Running"
    assert world.status.disruption is None
    assert world.status.restarts.total == 0
    healthy = world.status.condition(ConditionType.NODES_HEALTHY)
    assert healthy is None or healthy.status == "True"
    world.nodes[node] = dataclasses.replace(world.nodes[node], ready=False)
    put_on_record(world)
    until_left(world)


def test_a_job_whose_nodes_all_announce_a_time_that_passes_goes_on_upon_them() -> None:
    """Maintenance may begin hours after the time that a label tells, and all nodes of a pool tell the same."""
    world = running(nodes=2)
    names = {"node-0", "node-1"}
    world.bind = partial(bind_to, world, names)  # type: ignore[method-assign]
    for index in range(2):
        world.notice(index, NodeSignal(Reason.NODE_MAINTENANCE, "label", deadline=world.now + NOTICE))
    put_on_record(world)
    until_left(world)
    pass_time(world, 60)
    assert world.phase == "Restarting", "they may go at any moment"
    pass_time(world, NOTICE + OVERDUE_SECONDS + 120, step=5)
    assert world.phase == "Running"
    assert {pod.node for pod in world.pods.values()} == names
    assert world.status.restarts.infrastructure == 0
