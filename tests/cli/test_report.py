"""`everstep status` tells what there is to tell, and nothing when there is nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from everstep.cli.report import render_status
from everstep.cli.terminal import format_duration

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def shown(status: dict[str, Any], spec: dict[str, Any] | None = None) -> str:
    job = {
        "metadata": {"name": "digits", "namespace": "ml", "creationTimestamp": "2026-01-01T11:00:00Z"},
        "spec": {"numNodes": 2, **(spec or {})},
        "status": status,
    }
    console = Console(width=120, record=True, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render_status(job, NOW))
    return capture.get()


def test_a_job_nobody_has_looked_at_yet_is_pending() -> None:
    text = shown({})
    assert "digits in ml  Pending  created 1h00m ago" in text
    assert "0 of 2 ready" in text


def test_nodes_of_a_finished_job_are_not_called_unready() -> None:
    assert "ready" not in shown({"phase": "Succeeded", "nodes": 2, "readyNodes": 0})


def test_empty_parts_are_left_out() -> None:
    text = shown({"phase": "Running", "nodes": 2, "readyNodes": 2})
    for word in ("last failure", "conditions", "where the time went", "progress"):
        assert word not in text


def test_progress_has_step_rate_and_time_left() -> None:
    text = shown({"progress": {"step": 1200, "totalSteps": 5000, "stepsPerSecond": 14.2}})
    assert "step 1200 of 5000, 14.2 steps/s, 4m27s left" in text


def test_progress_without_a_total_is_a_step() -> None:
    assert "step 7\n" in "\n".join(line.rstrip() for line in shown({"progress": {"step": 7}}).splitlines())


def test_the_newest_checkpoint_and_what_was_restored_are_told() -> None:
    checkpoint = {
        "step": 1760,
        "time": "2026-01-01T11:59:48Z",
        "bytes": 5_284_932,
        "stallSeconds": 0.0123,
        "failedSaves": 2,
        "restored": {"id": "1.2", "step": 380, "tier": "peer", "seconds": 0.047, "lostSteps": 12, "passedOver": 1},
    }
    text = " ".join(shown({"checkpoint": checkpoint}).split())
    assert "checkpoint step 1760, 12s ago, 5.0 MiB, training held up for 0.012 s, 2 saves failed since" in text
    assert (
        "restored step 380 from another node's memory in 0.05 s, past 1 newer ones that are damaged; "
        "12 steps trained again" in text
    )


def test_a_job_that_has_saved_nothing_yet_has_no_line_of_checkpoints() -> None:
    text = shown({"checkpoint": {"failedSaves": 0, "lostSteps": 0, "restored": {"id": "1.1", "step": 0}}})
    assert "checkpoint " not in text.replace("no checkpoint", "")
    assert "restored  nothing: there was no checkpoint" in " ".join(text.split(" ")).replace("    ", "  ")
    assert "3 saves failed" in shown({"checkpoint": {"failedSaves": 3}})


def test_restarts_are_told_by_who_pays() -> None:
    text = shown(
        {"restarts": {"application": 1, "preemption": 2}}, {"restart": {"application": 3, "infrastructure": 20}}
    )
    assert "application 1 of 3, infrastructure 0 of 20, pre-emption 2 (free)" in text


def test_the_last_failure_names_node_rank_code_and_shows_the_log() -> None:
    failure = {
        "cause": "Application",
        "reason": "ApplicationError",
        "node": "n7",
        "rank": 0,
        "exitCode": 1,
        "message": "ValueError: boom",
        "logTail": ["Traceback", "ValueError: boom [/not markup]"],
    }
    text = shown({"lastFailure": failure})
    assert "Application (ApplicationError), node n7, rank 0, exit code 1" in text
    assert "| ValueError: boom [/not markup]" in text


def test_the_time_is_split_by_what_it_was_spent_on() -> None:
    text = shown({"timings": {"pending": 0, "starting": 5, "running": 90, "recovering": 5, "goodput": 0.94}})
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "90%" in lines["running"]
    assert "pending" not in lines
    assert "goodput 94.0%" in text


def test_the_cost_is_told_where_pools_have_prices() -> None:
    usage = {"spotNodeSeconds": 7200, "onDemandNodeSeconds": 3600, "unpricedNodeSeconds": 0, "cost": 12.5, "savings": 8}
    assert "cost  12.50, 2.0 node-hours spot, 1.0 node-hours on-demand, 8.00 saved by spot nodes" in shown(
        {"usage": usage}
    )
    partly = usage | {"unpricedNodeSeconds": 3600}
    assert "without 1.0 node-hours that have no price" in " ".join(shown({"usage": partly}).split())
    assert "cost" not in shown({"usage": usage | {"unpricedNodeSeconds": 10800}})


def test_conditions_are_listed_with_their_reasons() -> None:
    condition = {
        "type": "Ready",
        "status": "False",
        "reason": "NotStarted",
        "message": "…",
        "lastTransitionTime": "2026-01-01T11:59:30Z",
    }
    line = next(line for line in shown({"conditions": [condition]}).splitlines() if "Ready" in line and "False" in line)
    assert line.split()[:5] == ["Ready", "False", "NotStarted", "30s", "ago"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (9.96, "10.0s"), (59, "59s"), (60, "1m00s"), (3661, "1h01m"), (200_000, "2d07h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
