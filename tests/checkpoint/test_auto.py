"""The times at which a save is due."""

from __future__ import annotations

import math

import pytest

from everstep.checkpoint.save.trigger import (
    PRIOR,
    Trigger,
    compute_optimal_interval,
    estimate_mean_time_between_failures,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25), (30, 30.0)]
)
def test_durations_are_read_as_people_write_them(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "m", "10 m", "-5s", "5s!", 0, -1, math.inf, math.nan])
def test_anything_else_is_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(("cost", "mean"), [(0.1, 3600), (5, 86400), (60, 3600), (600, 7200)])
def test_the_optimal_interval_wastes_least(cost: float, mean: float) -> None:
    """Against Daly's exact model of the expected run time (his equation 20), searched by brute force."""

    def wasted(interval: float) -> float:
        return math.expm1((interval + cost) / mean) / interval

    best = min(wasted(mean * 10 ** (power / 200)) for power in range(-1200, 400))
    assert wasted(compute_optimal_interval(cost, mean)) <= 1.005 * best


def test_saves_that_cost_more_than_failures_leave_are_taken_once_per_failure() -> None:
    assert compute_optimal_interval(500, 200) == 200


def test_failures_are_learned_and_one_alone_does_not_decide() -> None:
    assert estimate_mean_time_between_failures(0, 0) == PRIOR
    assert estimate_mean_time_between_failures(9, 10 * 3600) == pytest.approx((PRIOR + 36000) / 10)


def due_at(trigger: Trigger, seconds: float, steps: int) -> list[int]:
    """The steps of a run of `steps` steps, one in `seconds`, at which saves are taken."""
    taken = []
    trigger.start(0, 0.0)
    for step in range(1, steps + 1):
        if trigger.due(step, step * seconds):
            taken.append(step)
            trigger.start(step, step * seconds)
    return taken


def test_time_alone_makes_a_save_due() -> None:
    assert due_at(Trigger.parse("10s", None, None), 1.0, 35) == [10, 20, 30]


def test_steps_are_multiples_wherever_the_run_began() -> None:
    trigger = Trigger.parse(None, 10, None)
    trigger.start(7, 0.0)
    assert next(step for step in range(8, 31) if trigger.due(step, 0.0)) == 10
    assert due_at(Trigger.parse(None, 10, None), 1.0, 35) == [10, 20, 30]


def test_a_multiple_that_is_stepped_over_is_not_lost() -> None:
    trigger = Trigger.parse(None, 10, None)
    trigger.start(8, 0.0)
    assert trigger.due(12, 0.0)


def test_both_may_be_given() -> None:
    assert due_at(Trigger.parse("12s", 10, None), 1.0, 25) == [10, 20]
    assert due_at(Trigger.parse("4s", 10, None), 1.0, 21) == [4, 8, 10, 14, 18, 20]


def test_auto_measures_first_and_then_keeps_to_the_optimum() -> None:
    trigger = Trigger.parse("auto", None, 3600.0)
    trigger.start(0, 0.0)
    assert trigger.due(1, 0.1)
    trigger.cost = 2.0
    assert trigger.interval == pytest.approx(compute_optimal_interval(2.0, 3600.0))


def test_auto_saves_no_faster_than_the_store_takes_them() -> None:
    trigger = Trigger.parse("auto", None, 60.0)
    trigger.cost, trigger.duration = 0.01, 40.0
    assert trigger.interval == pytest.approx(60.0)


def test_no_multiple_is_passed_without_asking() -> None:
    assert Trigger.parse(None, 10, None).limit(10) == 20
    assert Trigger.parse(None, 10, None).limit(13) == 20
    assert Trigger.parse("1m", None, None).limit(13) is None
