"""Nodes are counted by capacity type and priced by their pools, across restarts, moves and operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from everstep_operator.api.status import Usage
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.status_memory import undo_edit
from everstep_operator.plan.usage import BOOK_SECONDS
from tests.builders import job, pool
from tests.plan.pooled_world import PooledWorld
from tests.plan.world import World

PRICES = {"spot": 1.0, "demand": 3.0}
HOUR = 3600.0


def pass_time(world: World, seconds: float, step: float = 1.0) -> None:
    until = world.now + seconds
    while world.now < until:
        world.tick(step)
        world.reconcile()


def mixed(nodes: int = 4, least: int = 1) -> PooledWorld:
    made = job().nodes(nodes).pool("spot").pool("demand").spec(minOnDemand=least).build()
    return PooledWorld(made, {"spot": 9, "demand": 9}, PRICES)


def used(world: World) -> Usage:
    assert world.status.usage is not None
    return world.status.usage


def finish(world: World) -> None:
    world.end()
    world.run("Succeeded", limit=60)


def test_nodes_of_both_kinds_are_counted_and_priced() -> None:
    world = mixed()
    world.run("Running")
    bound = {pod.scheduled_at for pod in world.pods.values()}
    pass_time(world, HOUR, 10.0)
    finish(world)
    (since,) = bound
    assert since is not None
    usage, held = used(world), world.now - since
    assert (usage.spot_node_seconds, usage.on_demand_node_seconds) == pytest.approx((3 * held, held), abs=8)
    assert usage.unpriced_node_seconds == 0
    assert usage.cost == pytest.approx((3 * 1.0 + 3.0) * held / HOUR, rel=0.01)
    assert usage.savings == pytest.approx(3 * (3.0 - 1.0) * held / HOUR, rel=0.01)
    assert (usage.spot_nodes, usage.on_demand_nodes) == (0, 0), "it holds none any more"


def test_a_spot_pool_may_tell_what_its_nodes_would_cost_on_demand() -> None:
    world = PooledWorld(job().pool("spot").build(), {"spot": 1})
    world.pools["spot"] = pool("spot").spot().spec(pricePerHour=1.0, onDemandPricePerHour=5.0).build()
    world.run("Running")
    pass_time(world, HOUR, 10.0)
    finish(world)
    assert used(world).savings == pytest.approx(4 * used(world).cost)
    assert used(world).cost == pytest.approx(1.0, rel=0.01)


def test_without_prices_nodes_are_counted_and_said_to_have_none() -> None:
    world = PooledWorld(job().nodes(2).pool("spot").build(), {"spot": 2}).run("Running")
    pass_time(world, 100)
    finish(world)
    usage = used(world)
    assert usage.spot_node_seconds > 200
    assert usage.unpriced_node_seconds == usage.spot_node_seconds
    assert (usage.cost, usage.savings) == (0, 0)


def test_without_a_pool_the_labels_of_nodes_tell_the_kind() -> None:
    world = World(job().nodes(2).build()).run("Running")
    node = world.pods["digits-1"].node
    assert node is not None
    world.nodes[node] = NodeView(node, spot=True)
    pass_time(world, BOOK_SECONDS + 5)
    assert used(world).spot_nodes == used(world).on_demand_nodes == 1


def test_a_running_job_is_booked_every_ten_minutes_and_no_write_is_made_for_it_before() -> None:
    world = mixed().run("Running")
    world.train = lambda steps=1: None  # type: ignore[method-assign]
    pass_time(world, 60)
    before = len(world.statuses)
    pass_time(world, BOOK_SECONDS - 90)
    assert len(world.statuses) == before
    pass_time(world, 120)
    assert len(world.statuses) == before + 1
    assert world.reconcile().requeue_at is not None, "the next one is due"


def test_lost_pods_count_until_they_are_lost_and_their_replacements_since_they_are_bound() -> None:
    world = mixed().run("Running")
    pass_time(world, 300)
    world.vanish(2)
    pass_time(world, 300)
    finish(world)
    starts = world.now - used(world).on_demand_node_seconds
    assert starts > 0
    lacking = 3 * used(world).on_demand_node_seconds - used(world).spot_node_seconds
    assert 0 <= lacking <= 5, "the seconds between the pod and its replacement"


def test_an_operator_that_comes_back_goes_on_counting() -> None:
    """Nothing but the status is remembered."""
    world = mixed().run("Running")
    pass_time(world, 60)
    world.now += 2 * HOUR
    world.restart_operator()
    world.leader_reachable = True
    pass_time(world, 60)
    finish(world)
    assert used(world).on_demand_node_seconds == pytest.approx(2 * HOUR + 120, abs=15)
    assert used(world).spot_node_seconds == pytest.approx(3 * used(world).on_demand_node_seconds, rel=0.01)


def test_a_suspended_job_costs_nothing() -> None:
    world = mixed().run("Running")
    pass_time(world, 60)
    world.edit(suspend=True)
    world.run("Suspended", limit=60)
    before = used(world)
    pass_time(world, HOUR, 60.0)
    assert used(world) == before
    world.edit(suspend=False)
    world.run("Running", limit=60)
    pass_time(world, 60)
    finish(world)
    assert used(world).on_demand_node_seconds == pytest.approx(before.on_demand_node_seconds + 60, abs=15)


def test_pods_without_a_node_cost_nothing() -> None:
    world = PooledWorld(job().nodes(2).pool("spot").build(), {"spot": 0}, PRICES)
    pass_time(world, 60)
    assert world.status.usage is None


def test_a_move_to_the_next_pool_is_priced_by_it() -> None:
    made = job().nodes(2).pool("spot", "5m").pool("demand").build()
    world = PooledWorld(made, {"spot": 1, "demand": 2}, PRICES)
    world.run("Running", limit=900)
    pass_time(world, HOUR, 10.0)
    finish(world)
    usage = used(world)
    assert usage.spot_node_seconds == pytest.approx(300, abs=20)
    assert usage.on_demand_node_seconds == pytest.approx(2 * HOUR, abs=60)
    price = usage.spot_node_seconds / HOUR * 1.0 + usage.on_demand_node_seconds / HOUR * 3.0
    assert usage.cost == pytest.approx(price, abs=0.01)


def test_two_plans_of_one_moment_are_the_same() -> None:
    world = mixed().run("Running")
    world.tick(BOOK_SECONDS + 1)
    assert world.reconcile().changed
    assert not world.reconcile().changed


def test_a_status_that_tells_of_less_is_put_back() -> None:
    world = mixed().run("Running")
    pass_time(world, BOOK_SECONDS + 60)
    known = world.status
    for field in ("cost", "spot_node_seconds", "on_demand_node_seconds"):
        less = known.model_copy(update={"usage": used(world).model_copy(update={field: 0.0})})
        assert undo_edit(known, less) == known
    assert undo_edit(known, known.model_copy(update={"usage": None})) == known
    pass_time(world, BOOK_SECONDS + 60)
    assert undo_edit(known, world.status) is None, "another operator's goes on"


def test_a_time_in_the_future_stops_nothing() -> None:
    world = mixed().run("Running")
    far = dataclasses.replace(world.observe()).job.status.usage
    assert far is not None
    ahead = far.model_copy(update={"until": far.until.replace(year=far.until.year + 1)})
    world.job = world.job.model_copy(update={"status": world.status.model_copy(update={"usage": ahead})})
    pass_time(world, BOOK_SECONDS + 60)
    finish(world)
    assert used(world).on_demand_node_seconds > BOOK_SECONDS


def edit_spot_pool(world: PooledWorld) -> None:
    world.pools["spot"] = pool("spot").spec(pricePerHour=1.0).build()


def delete_spot_pool(world: PooledWorld) -> None:
    del world.pools["spot"]


@pytest.mark.parametrize("change", [edit_spot_pool, delete_spot_pool])
def test_a_pool_that_is_changed_beneath_a_job_counts_no_node_twice(change: Callable[[PooledWorld], None]) -> None:
    world = mixed().run("Running")
    pass_time(world, 60)
    (since,) = {pod.scheduled_at for pod in world.pods.values()}
    assert since is not None
    world.now += HOUR  # no operator looks
    change(world)
    world.restart_operator()
    world.leader_reachable = True
    pass_time(world, 60)
    finish(world)
    held = used(world).spot_node_seconds + used(world).on_demand_node_seconds
    assert held == pytest.approx(4 * (world.now - since), abs=20)


def test_the_pods_of_a_large_set_that_end_one_by_one_are_few_writes() -> None:
    made = job().nodes(100).pool("spot").pool("demand").spec(minOnDemand=1).build()
    world = PooledWorld(made, {"spot": 99, "demand": 1}, PRICES).run("Running")
    pass_time(world, 60)
    world.edit(suspend=True)
    world.reconcile()
    written = len(world.statuses)
    for name in list(world.pods):
        world.now += 0.05
        del world.pods[name]
        world.reconcile()
    assert len(world.statuses) <= written + 10, "as many as seconds have passed"
    pass_time(world, 5)
    assert world.phase == "Suspended"
    assert (used(world).spot_nodes, used(world).on_demand_nodes) == (0, 0), "the last of them is not forgotten"


def test_a_node_that_is_lost_while_another_comes_is_not_counted_until_the_next_booking() -> None:
    """As many are held as before, and not the same ones."""
    world = PooledWorld(job().nodes(4).pool("spot").build(), {"spot": 2})
    world.run("Scheduling")
    pass_time(world, 45)
    lost = world.pods["digits-1"]
    assert lost.scheduled_at is not None
    world.room["spot"] = 3
    pass_time(world, 2)
    assert used(world).spot_nodes == 2, "the third one is not booked yet"
    world.room["spot"] = 0
    world.vanish(1)
    held = world.now - lost.scheduled_at
    pass_time(world, 400)
    others = [pod.scheduled_at for pod in world.pods.values() if pod.scheduled_at is not None]
    assert len(others) == 2
    world.edit(suspend=True)
    world.run("Suspended", limit=60)
    held += sum(world.now - since for since in others)
    assert used(world).spot_node_seconds == pytest.approx(held, abs=5)
