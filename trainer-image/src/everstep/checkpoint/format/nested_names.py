"""Put together what ranks hold of a nested state, and see that it is one state: else nobody could build it again. Pure.

None and empty containers are no difference to what another rank has in their place: one rank may keep a history alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from everstep.checkpoint.errors import WriterConflict
from everstep.checkpoint.format.descriptions import KIND, is_description, object_of
from everstep.checkpoint.format.lines import as_text, shorten_value

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


def join_values(values: dict[str, object], more: Mapping[str, object]) -> None:
    """Add the packed values of a rank, or of a node, to those of others.

    Args:
        values: Of the others; what has nothing in it gives way to what is added.
        more: With the descriptions of their objects, of which those that are there count.

    Raises:
        WriterConflict: Both have another value under one name.
    """
    nested = find_nested_states(more)
    for name, value in more.items():
        known = values.setdefault(name, value)
        if known is value or is_description(name) or as_text(known) == as_text(value):
            continue
        gives_way = [is_empty(each) for each in (known, value)] if object_of(name) in nested else [False, False]
        if not any(gives_way) or (all(gives_way) and None not in (known, value)):
            raise WriterConflict(
                name, f"two writers disagree about this value: {shorten_value(known)}, {shorten_value(value)}"
            )
        if known is None or (gives_way[0] and value is not None):
            values[name] = value


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
