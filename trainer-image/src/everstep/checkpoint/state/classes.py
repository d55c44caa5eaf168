"""The class of an object, and whether its state may be given to one of another class: by names, in any process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Protocol

import torch

from everstep.checkpoint.state.kinds import ANEW

_ROOTS = (*torch.optim.Optimizer.__mro__, Protocol, Generic)

_WRAPPED_OPTIMIZERS = ("optim", "optimizer", "_optimizer", "base_optimizer")  # where wrappers hold what they wrap
_WRAPPED_SCHEDULERS = ("scheduler", "lr_scheduler", "_scheduler")


def name_classes(inner: object) -> list[str]:
    """Return the full names of an object's class and of those that it is derived from, the most special first."""
    return [f"{each.__module__}.{each.__qualname__}" for each in type(inner).__mro__ if each not in _ROOTS]


def kind_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of an optimizer's class and of those that it is derived from.

    Where it wraps another optimizer, they are those of what is within.
    """
    return name_classes(_unwrap_class(optimizer, torch.optim.Optimizer, _WRAPPED_OPTIMIZERS))


def is_of_kind(one: list[str], other: list[str]) -> bool:
    """Tell whether one of two classes is derived from the other, or is the other."""
    return any(_is_same(one[0], each) for each in other) or any(_is_same(other[0], each) for each in one)


def describe_stateful(inner: object) -> dict[str, Any]:
    """Return the classes of a scheduler or another object of torch's with a state_dict, and of schedulers in it.

    Nothing for any other object: a script's own class may have another name whenever it is changed.
    """
    found = _unwrap_class(inner, torch.optim.lr_scheduler.LRScheduler, _WRAPPED_SCHEDULERS)
    classes = name_classes(found)
    if not any(each.startswith("torch.") for each in classes):
        return {}
    parts = getattr(found, "_schedulers", None)
    described: dict[str, Any] = {"classes": classes}
    if isinstance(parts, list | tuple):
        described["parts"] = [describe_stateful(each) for each in parts]
    return described


def why_other_class(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return why the state of one object cannot be another's, both as describe_stateful() has them; None if it can."""
    if not ours or not theirs:
        return None
    one, other = ours["classes"], theirs["classes"]
    if not is_of_kind(one, other):
        return (
            f"{name} is a {other[0]} in the checkpoint, a {one[0]} here, whose state is another: make the same one, or "
            f"leave it out of restore() and {ANEW}"
        )
    parts, saved = ours.get("parts", ()), theirs.get("parts", ())
    if len(parts) != len(saved):
        return (
            f"{name} holds {len(saved)} schedulers in the checkpoint, {len(parts)} here: make the same ones, or leave "
            f"it out of restore() and {ANEW}"
        )
    pairs = enumerate(zip(parts, saved, strict=True))
    found = (why_other_class(f"{name}: its scheduler {number}", *pair) for number, pair in pairs)
    return next((each for each in found if each is not None), None)


def _unwrap_class(outer: Any, kind: type, attributes: tuple[str, ...]) -> Any:
    """Return the object of a class that wrappers hold in one of these attributes; `outer` where it wraps none."""
    seen = {id(outer)}
    while True:
        held = getattr(outer, "__dict__", {})
        within = next((held[each] for each in attributes if isinstance(held.get(each), kind)), None)
        if within is None or id(within) in seen:
            return outer
        outer = within
        seen.add(id(outer))


def _is_same(one: str, other: str) -> bool:
    if one == other:
        return True
    # A script is __main__ where it is run, and a module where it is imported.
    modules, qualified = zip(*(name.rpartition(".")[::2] for name in (one, other)), strict=True)
    return qualified[0] == qualified[1] and not {"__main__", "__mp_main__"}.isdisjoint(modules)
