"""Check that an optimizer's groups are in the order in which they were saved, where something else counts on that.

Options come back by the names of parameters. A scheduler has lists with one number for each group, by its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.state.kinds import ANEW, ObjectKind, Saved
from everstep.checkpoint.state.optimizers import OptimizerObject
from everstep.checkpoint.state.param_options import PLACES
from everstep.checkpoint.state.plain import StatefulObject


def find_order_problems(restored: Sequence[tuple[ObjectKind, Saved]]) -> list[str]:
    """Return why objects that are restored do not fit the order of the groups of an optimizer beside them.

    Args:
        restored: Each object, with what the checkpoint has of it.
    """
    problems: list[str] = []
    for kind, saved in restored:
        moved = _find_moved_group(kind, saved) if isinstance(kind, OptimizerObject) else None
        if moved is None or not isinstance(kind, OptimizerObject):
            continue
        params = {id(each) for each in kind.params}
        said, count = moved
        problems += [
            f"{other.prefix} has a number for each group of {kind.prefix} by its place, and {said}: build the groups "
            f"in the order in which they were saved, or leave {other.prefix} out of restore() and {ANEW}"
            for other, held in restored
            if isinstance(other, StatefulObject) and _counts_on_order(other.inner, held, params, count)
        ]
    return problems


def _find_moved_group(kind: OptimizerObject, saved: Saved) -> tuple[str, int] | None:
    """Return a group that had another place, in words, and how many there were.

    None where no group had another place, and where a checkpoint does not say.
    """
    places: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for name in saved.values:
        if name.startswith(f"{PLACES}."):
            param, _, place = name.removeprefix(f"{PLACES}.").rpartition(".")
            was_number, _, was_count = place.partition("-")
            places[param].add((int(was_number), int(was_count)))
    groups = kind.name_groups()
    for number, group in enumerate(groups):
        for name in group:
            if name in places and (number, len(groups)) not in places[name]:
                was, total = min(places[name])
                return (
                    f"the group of {name} was number {was} of {total} when saved, and is {number} of {len(groups)}",
                    total,
                )
    return None


def _counts_on_order(inner: object, saved: Saved, params: set[int], count: int) -> bool:
    """Tell whether an object is a scheduler of these parameters' optimizer, or has both it and lists.

    The lists are those with one number for each of the `count` groups.
    """
    held = list(_iterate_attributes(inner))
    optimizers = [each for each in held if isinstance(each, torch.optim.Optimizer)]
    if not any(id(param) in params for each in optimizers for group in each.param_groups for param in group["params"]):
        return False
    if any(isinstance(each, torch.optim.lr_scheduler.LRScheduler) for each in held):
        return True
    return any(_has_list(_unpack_saved(saved, name), count) for name in saved.values) or any(
        piece == f"[{count - 1}]" for name in saved.tensors for piece in name.split(".")
    )


def _iterate_attributes(outer: object) -> Iterator[Any]:
    """Yield the object, what its attributes hold, and what schedulers among these hold."""
    waiting: list[Any] = [outer]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif each is outer or isinstance(each, torch.optim.lr_scheduler.LRScheduler):
            waiting += getattr(each, "__dict__", {}).values()


def _unpack_saved(saved: Saved, name: str) -> Any:
    try:
        return saved.value(name)
    except CheckpointError:  # a problem that is told elsewhere
        return None


def _has_list(value: Any, count: int) -> bool:
    if isinstance(value, Mapping):
        return any(_has_list(each, count) for each in value.values())
    return isinstance(value, list | tuple) and (len(value) == count or any(_has_list(each, count) for each in value))
