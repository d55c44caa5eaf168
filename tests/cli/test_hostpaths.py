"""A command written for an image, on a machine that is not that image."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from everstep.cli.errors import CliError
from everstep.cli.hostpaths import PathMapping, adapt_command


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """src/train.py, and another train.py beside the manifest."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    (tmp_path / "train.py").touch()
    return tmp_path


def test_what_exists_here_is_left_alone(tree: Path) -> None:
    word = str(tree / "src" / "train.py")
    assert adapt_command([sys.executable, word], tree).argv[1] == word


def test_a_mapping_wins_over_the_manifest_s_folder(tree: Path) -> None:
    command = [sys.executable, "/opt/code/train.py"]
    mapped = adapt_command(command, tree, [PathMapping.parse(f"/opt/code={tree}/src")])
    assert mapped.argv[1] == str(tree / "src" / "train.py")
    assert adapt_command(command, tree).argv[1] == str(tree / "train.py")


def test_a_mapping_of_another_folder_changes_nothing(tree: Path) -> None:
    mapped = adapt_command([sys.executable, "/opt/codex/other.py"], tree, [PathMapping.parse(f"/opt/code={tree}/src")])
    assert mapped.argv[1] == "/opt/codex/other.py"
    assert mapped.changed == ()


def test_a_relative_path_is_the_user_s_own(tree: Path) -> None:
    assert adapt_command([sys.executable, "train.py"], tree).argv[1] == "train.py"


def test_python_is_the_given_one_then_the_shell_s_then_our_own(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapt_command(["python", "train.py"], tree, python=sys.executable).argv[0] == sys.executable
    (tree / "python").write_text("#!/bin/sh\n")
    (tree / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tree))
    assert adapt_command(["python", "train.py"], tree).argv[0] == "python"
    assert adapt_command(["python3", "train.py"], tree).argv[0] == sys.executable


def test_what_was_replaced_is_told(tree: Path) -> None:
    assert adapt_command([sys.executable, "/opt/train.py"], tree).changed == (
        ("/opt/train.py", str(tree / "train.py")),
    )


def test_a_missing_program_is_an_error_that_says_what_to_do(tree: Path) -> None:
    with pytest.raises(CliError, match="--map"):
        adapt_command(["/opt/nowhere"], tree)


@pytest.mark.parametrize("text", ["/opt/code", "code=src", "/opt/code=", "/opt/code=/nonexistent"])
def test_a_mapping_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(CliError, match="--map"):
        PathMapping.parse(text)
