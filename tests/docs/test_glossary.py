"""The glossary keeps its word: what it names is defined in the folder that it names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "glossary.md"
TRAINER = ROOT / "trainer-image" / "src" / "everstep"
OPERATOR = ROOT / "operator" / "src" / "everstep_operator"
ROW = re.compile(r"^\| (?!Term|---)(.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
PLACE = re.compile(r"((?:`\w+`(?:, )?)+) in `([\w/.]+)`")


def read_rows() -> list[tuple[str, str, str]]:
    """Return term, meaning and places of each row."""
    return ROW.findall(PAGE.read_text())


def find_folder(name: str) -> Path:
    """Return the folder that the page's last column names."""
    first, _, rest = name.partition("/")
    return {"operator": OPERATOR / rest, "everstep": TRAINER}.get(first, TRAINER / name)


@cache
def list_definitions(folder: Path) -> set[str]:
    """Return the names of all classes and functions of a folder's modules, at the top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    files = sorted(folder.rglob("*.py"))
    return {node.name for file in files for node in ast.parse(file.read_text()).body if isinstance(node, kinds)}


@pytest.mark.parametrize(("term", "places"), [(term, places) for term, _, places in read_rows()])
def test_every_name_of_the_glossary_is_defined_where_it_says(term: str, places: str) -> None:
    found = PLACE.findall(places)
    assert ", ".join(f"{names} in `{folder}`" for names, folder in found) == places
    missing = [
        f"{name} in {folder}"
        for names, folder in found
        for name in re.findall(r"`(\w+)`", names)
        if name not in list_definitions(find_folder(folder))
    ]
    assert missing == []


def test_each_part_of_the_glossary_has_a_term_once() -> None:
    for part in PAGE.read_text().split("\n## ")[1:]:
        terms = [term for term, _, _ in ROW.findall(part)]
        assert len(terms) > 5
        assert sorted(set(terms)) == sorted(terms), part.partition("\n")[0]
