"""The tables of cases, and what is read from them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep_operator.api.meta import API_VERSION

Case = dict[str, Any]


def cases(name: str) -> list[Any]:
    """The table ``cases/<name>.yaml`` as pytest parameters."""
    text = (Path(__file__).parent / "cases" / f"{name}.yaml").read_text(encoding="utf-8")
    # Each worker reads all tables before the first test: libyaml does so in a tenth of the time.
    table = yaml.load(text, Loader=yaml.CSafeLoader)
    return [pytest.param(case, id=case["name"].replace(" ", "-")) for case in table]


def manifest(case: Case, spec: str = "spec") -> dict[str, Any]:
    """The object of a case."""
    kind = case.get("kind", "TrainingJob")
    made = {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": copy.deepcopy(case.get("metadata", {"name": "case"})),
        **case.get("top", {}),
    }
    if not case.get("no_spec"):
        base = {} if case.get("bare") or kind != "TrainingJob" else {"image": "x"}
        made["spec"] = base | _expanded(case[spec])
    return made


def _expanded(value: Any) -> Any:
    """Large values, which a table only names: LONG a string, LONGKEY a map with a long key, REPEAT a large map."""
    match value:
        case {"LONG": int(size)}:
            return "x" * size
        case {"LONGKEY": int(size)}:
            return {"k" * size: "v"}
        case {"REPEAT": int(size)}:
            return {f"k{number}": "v" for number in range(size)}
        case dict():
            return {key: _expanded(item) for key, item in value.items()}
        case list():
            return [_expanded(item) for item in value]
    return value
