"""The laptop's part of the operator's bookkeeping: what ended, and who pays."""

from __future__ import annotations

from typing import Any

from everstep.cli.live import describe_progress
from everstep.cli.story import StateNarrator


def ended(identity: str, cause: str = "Application", **more: Any) -> dict[str, Any]:
    return {"id": identity, "cause": cause, "rank": 3, "exitCode": 1, "signal": None, "message": "boom", **more}


def state(*history: dict[str, Any], **more: Any) -> dict[str, Any]:
    base = {"incarnation": "i", "version": 1, "epoch": 1, "generation": len(history) + 1, "phase": "running"}
    return {
        **base,
        "nodes": 2,
        "joined": 2,
        "progress": None,
        "generationHistory": list(history),
        "outcome": None,
        **more,
    }


def test_a_generation_s_end_is_told_once_however_often_it_is_seen() -> None:
    story = StateNarrator(allowed=3)
    assert list(story.feed(state(ended("1.1")))) == [
        "generation 1.1 ended: Application, rank 3, exit code 1: boom (2 of 3 restarts left)"
    ]
    assert list(story.feed(state(ended("1.1"), version=2))) == []
    assert (story.charged, story.allowance) == ("1.1", 2)


def test_ids_are_ordered_as_numbers() -> None:
    story = StateNarrator(allowed=20)
    list(story.feed(state(*(ended(f"1.{number}") for number in range(1, 10)))))
    assert len(list(story.feed(state(ended("1.10"))))) == 1
    assert story.charged == "1.10"


def test_what_is_not_the_program_s_fault_is_free() -> None:
    story = StateNarrator(allowed=3)
    list(story.feed(state(ended("1.1", "PodLost"), ended("1.2", "OutOfMemory"))))
    assert story.allowance == 2


def test_an_exit_code_that_is_ignored_is_free() -> None:
    story = StateNarrator(allowed=3, ignored_codes=frozenset({75, 137}))
    said = list(story.feed(state(ended("1.1", exitCode=75), ended("1.2", "OutOfMemory", exitCode=137))))
    assert said[0].endswith("boom (not charged)")
    assert story.allowance == 2


def test_a_restart_counts_as_long_as_on_a_cluster() -> None:
    now = [1000.0]
    story = StateNarrator(allowed=2, window_seconds=3600, clock=lambda: now[0])
    list(story.feed(state(ended("1.1"))))
    now[0] += 3000
    list(story.feed(state(ended("1.2"))))
    assert story.allowance == 0
    now[0] += 601
    assert story.allowance == 1


def test_the_allowance_never_falls_below_nothing() -> None:
    story = StateNarrator(allowed=0)
    (sentence,) = story.feed(state(ended("1.1")))
    assert story.allowance == 0
    assert "left" not in sentence


def test_a_signal_is_told_in_place_of_its_exit_code() -> None:
    (sentence,) = StateNarrator(allowed=1).feed(state(ended("1.1", exitCode=137, signal=9)))
    assert "signal 9" in sentence
    assert "137" not in sentence


def test_the_bar_has_no_total_before_a_rank_reports_one() -> None:
    shown = describe_progress("j", state(phase="forming", joined=1))
    assert shown["total"] is None
    assert shown["words"] == "forming  1 of 2 nodes"


def test_the_bar_tells_step_rate_time_left_and_metrics() -> None:
    progress = {"step": 50, "totalSteps": 150, "stepsPerSecond": 10.0, "metrics": {"loss": 0.31234567}}
    shown = describe_progress("j", state(progress=progress))
    assert shown["words"] == "step 50 of 150  10/s  10s left  loss 0.3123"
    assert (shown["completed"], shown["total"], shown["description"]) == (50, 150, "j 1.1")
