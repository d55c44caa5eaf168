"""Keywords of all kinds in one place, as tests put them together, sorted into those that `pipeline()` takes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from everstep.pipeline import EngineOptions, LayoutOptions, PlanOptions

GROUPS: dict[str, type[Any]] = {"layout": LayoutOptions, "plan": PlanOptions, "engine": EngineOptions}
WHERE = {each.name: param for param, group in GROUPS.items() for each in fields(group)}


def group_options(**flat: Any) -> dict[str, Any]:
    """Return the arguments of `pipeline()` with each field of a dataclass of options in that dataclass."""
    direct = {name: value for name, value in flat.items() if name not in WHERE}
    grouped: dict[str, dict[str, Any]] = {}
    for name in flat.keys() - direct.keys():
        grouped.setdefault(WHERE[name], {})[name] = flat[name]
    return direct | {param: GROUPS[param](**given) for param, given in grouped.items()}
