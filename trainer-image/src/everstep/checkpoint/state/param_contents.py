"""A checkpoint's content for the state of an optimizer's parameters: found by their names, whatever the ranks were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.checkpoint.format.descriptions import KIND
from everstep.checkpoint.format.manifest import StoredTensor
from everstep.checkpoint.state import names
from everstep.checkpoint.state.axes import AXES
from everstep.checkpoint.state.kinds import Saved
from everstep.checkpoint.state.memory import get_local_tensor

STATE = "state"
LAYOUT = "layout"  # of each parameter: how its state lies, where neither the parameter nor the shape tells
KEPT = "kept"  # of each parameter: names of state that ranks keep for themselves
STATELESS = "stateless"  # of each parameter: that a rank without an element of it has no state for it


@dataclass
class ParamContent:
    """A checkpoint's content for the state of one parameter.

    Attributes:
        layout: How tensors lie, by names below the parameter.
        kept: The name of one of those that ranks keep for themselves, or None.
        is_left: Nothing is taken, because ranks without an element had none.
        axes: How the axes of tensors lie in memory, by names below the parameter, where they lie in an unusual way.
        tensors: The tensors by full names, each with its name below the parameter.
        values: By names below the parameter, where each value is.
    """

    layout: Mapping[str, Any]
    kept: str | None
    is_left: bool
    axes: Mapping[str, Sequence[int]]
    tensors: dict[str, tuple[str, StoredTensor]] = field(default_factory=dict)
    values: dict[str, tuple[Saved, str]] = field(default_factory=dict)


def find_param_contents(saved: Saved, own: Saved | None, params: Mapping[str, torch.Tensor]) -> list[ParamContent]:
    """Return the checkpoint's content for each parameter's state, in the order of `params`.

    Args:
        saved: The content for the optimizer.
        own: What this rank kept for itself beside it, if that is elsewhere.
        params: The parameters by name.

    Returns:
        One for each parameter.
    """
    found = {
        name: ParamContent(
            saved.value_or(names.join_segments(LAYOUT, name), {}),
            next(iter(saved.below(names.join_segments(KEPT, name)).values), None),
            is_left=names.join_segments(STATELESS, name) in saved.values and not get_local_tensor(param).numel(),
            axes=_find_value(names.join_segments(AXES, name, KIND), (own, saved)) or {},
        )
        for name, param in params.items()
    }
    for each in (saved,) if own is None else (saved, own):
        for name in (*each.tensors, *each.values):
            owner = name.removeprefix(f"{STATE}.")
            if owner == name:
                continue
            below = ""
            while owner not in found and owner:
                owner, _, last = owner.rpartition(".")
                below = names.join_segments(last, below)
            if not owner or found[owner].is_left:
                continue
            if name in each.tensors:
                found[owner].tensors[each.full(name)] = below, each.tensors[name]
            if name in each.values:
                found[owner].values[below] = each, name
    return list(found.values())


def _find_value(name: str, parts: Iterable[Saved | None]) -> Any:
    """Return the first part's value of this name; None where none has it."""
    return next((part.value(name) for part in parts if part is not None and name in part.values), None)
