"""Traps of this repository's own shape."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


PACKAGES = ("operator/src", "trainer-image/src", "benchmarks", "e2e", "examples")
MAX_LINES = 450
MAX_PARAMETERS = 10
MANY_PARAMETERS = {
    "trainer-image/src/everstep/cli/checkpoint_exchange.py: export": 11,
    "trainer-image/src/everstep/cli/pipeline.py: plan": 12,
}
# What would still fail there: a new package with tensors is checked from its first day.
NOT_CHECKED_WITH_TORCH = {"everstep.cli", "everstep.compat"}


def list_sources(folders: Sequence[str] = (*PACKAGES, "tests")) -> list[Path]:
    """Return every Python file in these folders."""
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def test_the_operator_folder_is_no_package() -> None:
    """`operator/__init__.py` would shadow the standard library for whoever starts Python in the root."""
    assert not (ROOT / "operator" / "__init__.py").exists()
    subprocess.run([sys.executable, "-c", "import collections, operator; operator.eq"], cwd=ROOT, check=True)


def test_the_map_in_contributing_has_every_package() -> None:
    """Packages of `compat` repeat another library's layout and are left out."""
    rows = re.findall(r"^\| `([^`|]+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    shown = {row.removeprefix("…/") for row in rows}
    for source in (ROOT / "operator" / "src" / "everstep_operator", ROOT / "trainer-image" / "src" / "everstep"):
        for package in (init.parent for init in source.rglob("__init__.py") if init.parent != source):
            inner = str(package.relative_to(source))
            if not inner.startswith("compat/"):
                assert inner in shown or str(package.relative_to(ROOT)) in shown, inner


def test_a_public_class_name_means_one_thing() -> None:
    """Names that `compat` repeats from another library are that library's."""
    found = defaultdict[str, list[str]](list)
    for source in (ROOT / "operator" / "src", ROOT / "trainer-image" / "src"):
        for file in source.rglob("*.py"):
            if "compat" not in file.parts:
                classes = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef))
                for each in classes:
                    found[each.name].append(f"{file.relative_to(ROOT)}:{each.lineno}")
    assert {name: where for name, where in found.items() if len(where) > 1 and not name.startswith("_")} == {}


def test_tensor_code_is_type_checked_with_torch() -> None:
    """Without torch's types, a call of torch that does not exist is no error."""
    recipe = (ROOT / "Makefile").read_text().partition("\ntypes:")[2].partition("\n\n")[0]
    assert "$(RUN_TORCH) mypy --config-file mypy-torch.ini" in recipe
    config = configparser.ConfigParser()
    config.read(ROOT / "mypy-torch.ini")
    checked = {name.strip() for name in config["mypy"]["packages"].split(",")}
    silenced = [name for name in config.sections() if config[name].getboolean("ignore_errors", fallback=False)]
    with_torch = {
        f"everstep.{package.name}"
        for package in (ROOT / "trainer-image" / "src" / "everstep").iterdir()
        if any(re.search(r"^\s*(import|from) torch\b", file.read_text(), re.M) for file in package.rglob("*.py"))
    }
    assert checked == with_torch - NOT_CHECKED_WITH_TORCH
    assert silenced == []


def test_docstrings_begin_with_their_verb_or_subject() -> None:
    """ "Of …" and "What …" say neither what a function does nor what a class is."""
    wrong = []
    for file in list_sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = ((ast.get_docstring(node) or "").split() or [""])[0]
                if first in {"What", "Of", "How", "Whether", "Which", "Who", "When", "Where"}:
                    wrong.append(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    assert wrong == []


def test_files_stay_short() -> None:
    """A longer one has more than one purpose: it is split along the seam between them."""
    lines = {file: len(file.read_text().splitlines()) for file in list_sources((*PACKAGES, "tests"))}
    assert {str(file.relative_to(ROOT)): n for file, n in lines.items() if n > MAX_LINES} == {}


def list_parameters(tree: ast.AST) -> dict[str, int]:
    """Return the number of parameters of each function of a file, without `self`; those of methods with their class."""
    found = {}
    for node in ast.walk(tree):
        for each in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [arg.arg for arg in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)]
                owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                found[owner + each.name] = len(names) - (names[:1] in (["self"], ["cls"]))
    return found


def test_functions_have_few_parameters() -> None:
    """Options beyond ten are grouped into documented dataclasses; the list of exceptions may only become shorter."""
    found = {
        f"{file.relative_to(ROOT)}: {name}": count
        for file in list_sources(PACKAGES)
        for name, count in list_parameters(ast.parse(file.read_text())).items()
        if count > MAX_PARAMETERS
    }
    assert found == MANY_PARAMETERS


def test_the_library_imports_without_its_extras() -> None:
    """A rank imports `everstep` for one call: it must cost next to nothing and need nothing."""
    heavy = "{'torch', 'pydantic', 'kubernetes', 'typer'}"
    source = f"import sys, everstep; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    subprocess.run([sys.executable, "-c", source], check=True)
