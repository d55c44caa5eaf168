"""The walks in CONTRIBUTING.md lead along code that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def read_walks() -> dict[str, list[tuple[str, list[str]]]]:
    """Return by title the steps of each walk: a file, and the functions and classes that are named in it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## Three walks through the code\n")[2].partition("\n## ")[0]
    walks = {}
    for part in section.split("### ")[1:]:
        title, _, body = part.partition("\n")
        steps = re.findall(r"^\d+\. `([^`]+)`:\s((?:`[^`]+`,?\s?)+)\.", body, re.MULTILINE)
        assert len(steps) == len(re.findall(r"^\d+\. ", body, re.MULTILINE)), title
        walks[title] = [(file, re.findall(r"`([^`]+)`", names)) for file, names in steps]
    return walks


def list_definitions(file: Path) -> set[str]:
    """Return the names of the functions and classes of a file, those of methods with their class."""
    found = set()
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, kinds):
            found.add(node.name)
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, kinds)}
    return found


WALKS = read_walks()


def test_there_are_three_walks() -> None:
    assert len(WALKS) == 3
    assert all(len(steps) >= 5 for steps in WALKS.values())


@pytest.mark.parametrize("title", WALKS)
def test_every_file_and_function_of_a_walk_exists(title: str) -> None:
    missing = []
    for file, names in WALKS[title]:
        found = list_definitions(ROOT / file)
        missing += [f"{file}: {name}" for name in names if name not in found]
    assert missing == []


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_turns_back_at_most_once(title: str) -> None:
    files = [file for file, _ in WALKS[title]]
    assert len(files) - len(set(files)) <= 1
