"""A leader's answer comes out of the user's pod: it is bounded, typed, and never breaks anything."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.plan.leader_view import (
    ANSWER_AGE_SECONDS,
    LeaderView,
    SickGpu,
    parse_generation_id,
    parse_leader_state,
)
from everstep_operator.plan.observation import parse_pod, parse_termination_message
from tests.builders import job
from tests.plan.world import World

STATE: dict[str, Any] = {
    "protocol": 1,
    "incarnation": "9f",
    "version": 17,
    "epoch": 2,
    "generation": 3,
    "phase": "running",
    "nodes": 4,
    "joined": 4,
    "missing": [],
    "unclean": [{"index": 2, "uid": "u", "message": "m"}],
    "gpus": {"models": {"H100": 32}, "unhealthy": 1, "devices": [{"index": 2, "name": "H100", "problem": "p"}]},
    "ranksStartedAt": 1760000000.0,
    "progress": {"step": 1200, "totalSteps": 5000, "stepsPerSecond": 14.2, "metrics": {"loss": 0.31}, "at": 1.0},
    "generationHistory": [
        {"id": "2.2", "cause": "Application", "index": 1, "rank": 3, "exitCode": 1, "signal": None, "endedAt": 0.0},
        {"id": "2.1", "cause": "PodLost", "index": 1},
    ],
    "outcome": None,
}


def test_a_state_is_read() -> None:
    view = parse_leader_state(STATE, answered_at=5.0)
    assert (view.epoch, view.generation, view.phase) == (2, 3, "running")
    assert view.progress is not None
    assert (view.progress.step, view.progress.steps_per_second) == (1200, 14.2)
    assert [e.id for e in view.history] == ["2.1", "2.2"], "in the order of generations"
    assert view.outcome is None
    assert view.sick_gpus == (SickGpu(2, "H100", "p"),)


def test_an_entry_ended_before_it_was_told_whatever_the_nodes_clock_says() -> None:
    state = {**STATE, "generationHistory": [{"id": "2.2", "cause": "PodLost", "endedAt": 999.0}]}
    first = parse_leader_state(state, answered_at=5.0)
    assert [e.ended_at for e in first.history] == [5.0]
    later = parse_leader_state(state, answered_at=50.0, before=first)
    assert later.history == first.history, "the limit does not move with each answer"
    restarted = parse_leader_state({**state, "incarnation": "a0"}, answered_at=50.0, before=first)
    assert [e.ended_at for e in restarted.history] == [50.0]
    assert [e.ended_at for e in parse_leader_state(STATE, answered_at=5.0).history] == [None, 0.0]


def test_what_is_new_happened_since_the_last_answer_though_the_nodes_clock_is_behind() -> None:
    """It is by as long as its machine was suspended. A lost pod would look like its replacement, and each save as if it
    were overdue."""
    first = parse_leader_state({**STATE, "generationHistory": []}, answered_at=1000.0)
    ended = {"id": "2.2", "cause": "PodLost", "endedAt": 1.0}
    saved = {"step": 1200, "at": 1.0}
    state = {**STATE, "generationHistory": [ended], "checkpoint": saved}
    second = parse_leader_state(state, answered_at=1005.0, before=first)
    assert [e.ended_at for e in second.history] == [1000.0 - ANSWER_AGE_SECONDS]
    assert second.checkpoint is not None
    assert second.checkpoint.at == 1000.0 - ANSWER_AGE_SECONDS
    third = parse_leader_state(state, answered_at=1030.0, before=second)
    assert (third.history, third.checkpoint) == (second.history, second.checkpoint), "what is known does not move"
    later = parse_leader_state({**state, "checkpoint": {"step": 1300, "at": 2.0}}, answered_at=1060.0, before=third)
    assert later.checkpoint is not None
    assert later.checkpoint.at == 1030.0 - ANSWER_AGE_SECONDS
    right = parse_leader_state(
        {**state, "generationHistory": [{**ended, "endedAt": 1003.5}]}, answered_at=1005.0, before=first
    )
    assert [e.ended_at for e in right.history] == [1003.5], "of a clock that is right, the time itself"


def test_a_generation_runs_since_the_operator_was_told_whatever_the_nodes_clock_says() -> None:
    starting = parse_leader_state({**STATE, "phase": "starting"}, answered_at=4.0)
    first = parse_leader_state(STATE, answered_at=5.0, before=starting)
    assert first.running_since == 5.0
    assert parse_leader_state(STATE, answered_at=50.0, before=first).running_since == 5.0
    assert parse_leader_state({**STATE, "generation": 4}, answered_at=50.0, before=first).running_since == 50.0
    assert parse_leader_state({**STATE, "incarnation": "a0"}, answered_at=50.0, before=first).running_since == 50.0
    stopping = parse_leader_state({**STATE, "phase": "stopping"}, answered_at=50.0, before=first)
    assert stopping.running_since is None


def test_since_when_a_generation_runs_is_not_known_to_an_operator_that_finds_it_running() -> None:
    first = parse_leader_state(STATE, answered_at=5.0)
    second = parse_leader_state(STATE, answered_at=6.0, before=first)
    assert (first.running_since, second.running_since) == (None, None)
    asked = LeaderView(reachable=False, asked_since=4.0)
    assert parse_leader_state(STATE, answered_at=5.0, before=asked).running_since is None, "nor was there an answer yet"
    assert parse_leader_state({**STATE, "generation": 4}, answered_at=7.0, before=second).running_since == 7.0


def test_what_is_too_much_is_cut() -> None:
    flood = {
        **STATE,
        "generationHistory": [{"id": f"2.{i}", "message": "x" * 10**5} for i in range(1000)],
        "missing": [1] * 10**5,
    }
    view = parse_leader_state(flood, answered_at=5.0)
    assert len(view.history) == 64
    assert len(view.missing) <= 4096
    assert max(len(e.message) for e in view.history) <= 1024


def test_ids_are_two_plain_numbers() -> None:
    assert parse_generation_id("2.10") > parse_generation_id("2.9") > parse_generation_id("1.99")
    for odd in ("", "2", "2.", ".1", "a.b", "-1.2", "2.1.1", "²." + "1" * 50):
        assert parse_generation_id(odd) == (-1, -1)


def test_a_generation_that_no_charge_can_hold_is_none_wherever_it_is_read() -> None:
    for much in (10**9, 2**53, 10**400, "1234567890", True, -1):
        view = parse_leader_state({**STATE, "epoch": much, "generation": much}, answered_at=5.0)
        assert (view.epoch, view.generation) == (0, 0)
        word = parse_termination_message(json.dumps({"result": "failed", "epoch": much, "generation": much}))
        assert word is not None
        assert word.generation == 0
    labels = {f"everstep.dev/{name}": "1234567890" for name in ("index", "epoch", "template")}
    pod = parse_pod({"metadata": {"labels": labels}})
    assert (pod.index, pod.epoch, pod.template) == (-1, -1, -1)


def test_a_status_with_a_generation_that_no_charge_can_hold_breaks_no_reconcile() -> None:
    """Stored by a version that believed its leader."""
    world = World(job().nodes(2).build()).run("Running")
    status = world.status.model_copy(update={"generation": 10**10})
    world.job = world.job.model_copy(update={"status": status})
    world.vanish(0)
    world.tick()
    world.reconcile()
    assert world.status.restarts.total == 1
    world.run("Running")
    assert world.status.restarts.total == 1, "charged once"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=10,
)


@given(odd=st.dictionaries(st.sampled_from(sorted(STATE)), JSON), whole=JSON)
def test_no_answer_breaks_the_operator(odd: dict[str, Any], whole: Any) -> None:
    parse_leader_state({**STATE, **odd}, answered_at=5.0)
    parse_leader_state(whole, answered_at=5.0)


def test_numbers_and_text_that_nothing_can_hold() -> None:
    raw = {
        "progress": {"step": 1, "stepsPerSecond": -1.0, "at": 10**400},
        "outcome": {"result": "failed", "message": "\ud800"},
        "generationHistory": [{"id": "1234567890.1"}],
    }
    view = parse_leader_state(raw, answered_at=1.0)
    assert view.progress is not None
    assert view.progress.at is None
    assert view.progress.steps_per_second is None
    assert view.outcome is not None
    assert view.outcome.message == "?"
    assert view.history == ()
