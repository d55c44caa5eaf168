"""Counts the nodes that a job's pods hold, by capacity type, and what they cost by the prices of their pools.

A pod holds its node from when it is bound until its end is confirmed. The status has what was counted, the time up to
which it was, and the number of nodes held then: whoever comes next, after however long, goes on from there. Nodes that
are given back while no operator runs count until one looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.status import Usage
from everstep_operator.plan.decision import Decision
from everstep_operator.plan.plan_context import PlanContext, to_utc

CapacityType = Literal["spot", "on-demand"]

# A status that only counted seconds would be written all the time; at the latest after so long it is.
BOOK_SECONDS = 600.0
# Nodes that are given back are booked after so long: the pods of a large set end one by one, in few writes.
GIVEN_BACK_SECONDS = 1.0
_HOUR = 3600.0
_OVER = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class _Price:
    """Prices of one node for an hour; None where nobody has said."""

    paid: float | None = None
    on_demand: float | None = None


def update_usage(s: PlanContext, decision: Decision) -> tuple[Usage | None, bool]:
    """Return the usage up to now, None while no pod of the job has ever had a node; and whether nodes that were held
    are held no more."""
    old, now = s.status.usage, s.now
    held = [] if s.phase.finished else _list_held_nodes(s)
    if old is None and not held:
        return None, False
    since = min(old.until.timestamp(), now) if old is not None else float("-inf")  # a clock may have been set back
    seconds: dict[CapacityType, float] = {"spot": 0.0, "on-demand": 0.0}
    known: Counter[CapacityType] = Counter()
    for kind, bound in held:
        known[kind] += bound <= since
        start = bound if bound > since else since
        seconds[kind] += now - start if now > start else 0.0
    before = _count_held(old)
    gone = left = max(0, sum(before.values()) - known.total())
    for kind in before:
        # Those that are gone were held until a moment ago: less of them than before is written soon. A node whose pool
        # is edited or deleted is not gone: it is one of the other kind now, and not held twice.
        ended = min(left, max(0, before[kind] - known[kind]))
        seconds[kind] += ended * (now - since) if ended else 0.0
        left -= ended
    counts = Counter([] if decision.phase.finished else [kind for kind, _ in held])
    usage = _add_seconds(old or Usage(until=to_utc(now)), s, seconds).model_copy(
        update={"until": to_utc(now), "spot_nodes": counts["spot"], "on_demand_nodes": counts["on-demand"]}
    )
    return usage, gone > 0


def find_booking_time(
    old: Usage | None, new: Usage | None, has_ended: bool, written_at: float, interval: float
) -> float | None:
    """Return when a usage is to be written for its own sake; None: not before something else is.

    Args:
        old: As it is in the status.
        new: As it is now.
        has_ended: Whether nodes that were held are held no more, though others may be.
        written_at: When the status was last written (Unix seconds).
        interval: Seconds between two writes of what may wait.
    """
    if new is None:
        return None
    before, after = _count_held(old), _count_held(new)
    if has_ended:
        return written_at + GIVEN_BACK_SECONDS
    if after != before:
        return written_at + interval
    return old.until.timestamp() + BOOK_SECONDS if old is not None and any(after.values()) else None


def _count_held(usage: Usage | None) -> dict[CapacityType, int]:
    if usage is None:
        return {"spot": 0, "on-demand": 0}
    return {"spot": usage.spot_nodes, "on-demand": usage.on_demand_nodes}


def _list_held_nodes(s: PlanContext) -> list[tuple[CapacityType, float]]:
    """Return of each node that a pod holds its capacity type and since when.

    The type is that of the pool that the pod was made for; without one, what the labels of its node say. This is done
    for each of thousands of pods in each pass, so it calls no function for one.
    """
    first, first_pool, rest_pool = s.num_on_demand, s.on_demand_pool, s.pool
    kinds = [pool.spec.capacity_type if pool is not None else None for pool in (first_pool, rest_pool)]
    on_spot = {name for name, node in s.observed.nodes.items() if node.spot}
    return [
        (kinds[pod.index >= first] or ("spot" if pod.node in on_spot else "on-demand"), pod.scheduled_at)
        for pod in s.current.values()
        if pod.scheduled_at is not None and pod.gone_since is None and pod.phase not in _OVER
    ]


def _add_seconds(usage: Usage, s: PlanContext, seconds: Mapping[CapacityType, float]) -> Usage:
    cost, savings, unpriced = usage.cost, usage.savings, usage.unpriced_node_seconds
    for kind, spent in seconds.items():
        price = _find_price(s, kind)
        if price.paid is None:
            unpriced += spent
            continue
        cost += spent / _HOUR * price.paid
        if kind == "spot" and price.on_demand is not None:
            savings += spent / _HOUR * (price.on_demand - price.paid)
    return usage.model_copy(
        update={
            "spot_node_seconds": round(usage.spot_node_seconds + seconds["spot"], 3),
            "on_demand_node_seconds": round(usage.on_demand_node_seconds + seconds["on-demand"], 3),
            "unpriced_node_seconds": round(unpriced, 3),
            "cost": round(cost, 9),  # each booking adds its rounding
            "savings": round(savings, 9),
        }
    )


def _find_price(s: PlanContext, kind: CapacityType) -> _Price:
    """Return the prices of the job's nodes of one kind: it is in one pool of each kind at a time."""
    pools = [pool for pool in (s.on_demand_pool, s.pool) if pool is not None and pool.spec.capacity_type == kind]
    if not pools:
        return _Price()
    spec = pools[0].spec
    named = (s.observed.pools.get(choice.name) for choice in s.spec.pools)
    regular = [pool for pool in (s.on_demand_pool, *named) if pool is not None and pool.is_on_demand]
    told = spec.on_demand_price_per_hour
    return _Price(spec.price_per_hour, told if told is not None else _first_price(regular))


def _first_price(pools: list[TrainingPool]) -> float | None:
    return next((pool.spec.price_per_hour for pool in pools if pool.spec.price_per_hour is not None), None)
