"""See that what ranks hold of a nested state are names of one state: else nobody could build it again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from everstep.checkpoint.errors import WriterConflict
from everstep.checkpoint.format.descriptions import KIND, is_description, object_of

_NESTED = ("value", "stateful")  # kinds of objects whose leaves are named by their places in a nested state
_EMPTY: tuple[object, ...] = ([], *({tag: []} for tag in ("dict", "tuple", "OrderedDict", "Counter")))


def find_nested_states(values: Mapping[str, object]) -> set[str]:
    """Return the full names of the objects that are nested states, by their descriptions among packed values."""
    described = {name: object_of(name) for name in values if is_description(name)}
    return {each for name, each in described.items() if name == f"{each}.{KIND}" and _is_nested(values[name])}


def _is_nested(description: Any) -> bool:
    # As values.pack_value() has written it. It is not unpacked: that may take torch, which the writer does not have.
    return any(key == "is" and kind in _NESTED for key, kind in description.get("dict", ()))


def is_empty(packed: object) -> bool:
    """Tell whether a packed value is None or an empty container: another rank may have something in it."""
    if isinstance(packed, dict) and "defaultdict" in packed:
        return not packed["defaultdict"][1]
    return packed is None or packed in _EMPTY


def find_contradiction(names: Mapping[str, bool]) -> tuple[str, str] | None:
    """Return two names of leaves that no state can have both, or None.

    One is a value and the other lies in it; or their container is a dictionary for one and a list for the other.

    Args:
        names: Of leaves, with whether each is more than None or an empty container.
    """
    kinds: dict[str, tuple[str, str]] = {}  # of containers: what their pieces begin with, and a leaf that says so
    for name in names:
        child = name
        while (end := child.rfind(".")) > 0:
            container, kind = child[:end], child[end + 1]
            kind = kind if kind in "[(" else ""
            known = kinds.setdefault(container, (kind, name))
            if known[0] != kind:
                return known[1], name
            if known[1] is not name:
                break  # what it lies in itself was looked at
            if names.get(container):
                return container, name
            child = container
    return None


def check_states(tensors: Iterable[str], values: Mapping[str, object]) -> None:
    """See that each nested state of a checkpoint can be built again from its leaves.

    Args:
        tensors: Their full names.
        values: Packed, with the descriptions of objects.

    Raises:
        WriterConflict: One cannot, because ranks hold different kinds of things at one place.
    """
    nested = find_nested_states(values)
    names = {name: not is_empty(value) for name, value in values.items() if not is_description(name)}
    names.update(dict.fromkeys(tensors, True))
    found = find_contradiction({name: is_solid for name, is_solid in names.items() if object_of(name) in nested})
    if found is not None:
        one, other = found
        raise WriterConflict(one, f"is held by one rank, and {other} by another: no state has both")
