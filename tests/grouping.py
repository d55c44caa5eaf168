"""Keywords of all kinds, as tests put them together, sorted into the dataclasses of options that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def sort_into_groups(groups: Mapping[str, type[Any]], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function: of each field of a dataclass of `groups` that dataclass, under its argument.

    Args:
        groups: For each argument that takes a dataclass of options, that dataclass.
        flat: Arguments and fields by their names.
    """
    where = {each.name: param for param, group in groups.items() for each in fields(group)}
    grouped: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        if name in where:
            grouped.setdefault(where[name], {})[name] = value
    direct = {name: value for name, value in flat.items() if name not in where}
    return direct | {param: groups[param](**given) for param, given in grouped.items()}
