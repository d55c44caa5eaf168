"""A program that says why it failed, where the container contract has a place for it, is quoted."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from everstep.agent import report


def test_the_programs_own_words_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "failure").write_text("x" * 5000)
    assert report.read_failure_file(tmp_path / "failure") == "x" * report.MAX_FAILURE_CHARS


def test_an_earlier_generation_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "failure").write_text("old news")
    assert report.read_failure_file(report.remove_failure_file(tmp_path)) == ""


def test_no_file_is_no_message(tmp_path: Path) -> None:
    assert report.read_failure_file(report.remove_failure_file(tmp_path / "absent")) == ""


def test_nobody_waits_for_a_pipe_in_the_place_of_the_file(tmp_path: Path) -> None:
    """An agent that opens one would wait for ever, and its heartbeats with it."""
    os.mkfifo(tmp_path / "failure")

    def ask_and_tell() -> None:
        report.read_failure_file(tmp_path / "failure")
        report.write_failure_file(tmp_path, "exited with code 3", ())

    ended = threading.Thread(target=ask_and_tell, daemon=True)
    ended.start()
    ended.join(10)
    assert not ended.is_alive()
