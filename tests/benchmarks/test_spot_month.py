"""The simulated month counts what it says: the time in which no new step was trained, whatever came in between."""

from __future__ import annotations

import pytest

from benchmarks.spot_month import (
    EVENTS,
    MONTH,
    NOTICE,
    SIZES,
    Delays,
    Disruption,
    Month,
    make_events,
    read_events,
    simulate_restarts,
)

HOUR = 3600.0
SET_UP = Delays().node + Delays().pod + Delays().restore


def lose(*events: Disruption, hours: float = 3.0) -> tuple[float, Month]:
    """Return the seconds in which four nodes trained no new step, beside the time to set up."""
    month = Month(4, Delays())
    return hours * HOUR - SET_UP - month.meet_events(events, hours * HOUR), month


def test_an_undisturbed_job_loses_nothing() -> None:
    lost, _ = lose()
    assert lost == pytest.approx(0, abs=10)


def test_a_notice_costs_the_time_without_a_node_and_no_step() -> None:
    lost, month = lose(Disruption(1.01 * HOUR, "spot", 2))
    assert lost == pytest.approx(SET_UP + Delays().save, abs=15)
    assert (month.status.restarts.preemption, month.status.restarts.infrastructure) == (1, 0)
    assert month.kinds == {"spot": 1}


def test_a_lost_node_costs_its_evidence_and_the_steps_since_the_last_copy_too() -> None:
    lost, month = lose(Disruption(1.01 * HOUR, "lost", 2))
    assert SET_UP + Delays().silence <= lost + 10
    assert lost <= SET_UP + Delays().silence + Delays().every + 90  # the ranks' end and the fence timeout
    assert month.status.restarts.infrastructure == 1


def test_a_node_in_use_no_more_is_lost_once() -> None:
    twice = Disruption(1.01 * HOUR, "spot", 2), Disruption(1.01 * HOUR + 1, "spot", 2)
    assert lose(*twice)[1].kinds == {"spot": 1}


def test_the_other_policy_loses_what_it_trained_since_the_last_hour() -> None:
    delays = Delays()
    ready = delays.node + delays.pod
    crash = Disruption(ready + 1.5 * HOUR, "crash", 0)
    undisturbed, disturbed = (simulate_restarts(events, delays, 4 * HOUR) for events in ((), (crash,)))
    assert undisturbed == 4 * HOUR - ready
    assert undisturbed - disturbed == 0.5 * HOUR + delays.pod + delays.restore_from_store
    reclaimed = simulate_restarts((Disruption(crash.at - NOTICE, "spot", 0),), delays, 4 * HOUR)
    assert disturbed - reclaimed == delays.node


def test_the_written_month_is_the_one_that_is_drawn() -> None:
    drawn = [(round(event.at), event.kind, event.node) for event in make_events(max(SIZES), MONTH)]
    assert sorted(drawn) == sorted((event.at, event.kind, event.node) for event in read_events(EVENTS))
