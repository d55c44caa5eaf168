"""Keywords of all kinds in one place, as tests put them together, sorted into those that a session takes."""

from __future__ import annotations

from typing import Any

from everstep import MemoryOptions, RetentionOptions, StorageOptions, TimeOptions
from tests.grouping import sort_into_groups

GROUPS: dict[str, type[Any]] = {
    "retention": RetentionOptions,
    "memory": MemoryOptions,
    "storage": StorageOptions,
    "times": TimeOptions,
}


def group_session(**flat: Any) -> dict[str, Any]:
    """Return the arguments of `everstep.checkpointer()` with each field of a dataclass of options in that dataclass."""
    return sort_into_groups(GROUPS, flat)
