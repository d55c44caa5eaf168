"""A program that says why it failed, where the container contract has a place for it, is quoted."""

from __future__ import annotations

from pathlib import Path

from everstep.agent import report


def test_the_programs_own_words_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "failure").write_text("x" * 5000)
    assert report.read_failure(tmp_path / "failure") == "x" * report.MAX_FAILURE


def test_an_earlier_generation_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "failure").write_text("old news")
    assert report.read_failure(report.forget_failure(tmp_path)) == ""


def test_no_file_is_no_message(tmp_path: Path) -> None:
    assert report.read_failure(report.forget_failure(tmp_path / "absent")) == ""
