"""Keywords of all kinds in one place, as tests put them together, sorted into those that `pipeline()` takes."""

from __future__ import annotations

from typing import Any

from everstep.pipeline import EngineOptions, LayoutOptions, PlanOptions
from tests.grouping import sort_into_groups


def group_options(**flat: Any) -> dict[str, Any]:
    """Return the arguments of `pipeline()` with each field of a dataclass of options in that dataclass."""
    return sort_into_groups({"layout": LayoutOptions, "plan": PlanOptions, "engine": EngineOptions}, flat)
