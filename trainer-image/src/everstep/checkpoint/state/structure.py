"""Describe what an object is, and how the dictionaries of a nested state are built, as far as names do not tell.

A checkpoint holds the description as one value beside each object's leaves, called %kind. A reader of an older one,
which has none, goes by the names: then dictionaries are plain ones, in the order of their names.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from everstep.checkpoint.format.descriptions import KIND
from everstep.checkpoint.format.values import pack_value, unpack_value
from everstep.checkpoint.state import names
from everstep.checkpoint.state.aliases import find_aliases, share_objects
from everstep.checkpoint.state.module_metadata import IS_SAID, METADATA, read_unusual, set_metadata

__all__ = [
    "KIND",
    "MODULE",
    "OPTIMIZER",
    "STATEFUL",
    "VALUE",
    "build_structure",
    "describe_containers",
    "describe_module",
    "describe_state",
    "describe_structure",
]

MODULE, OPTIMIZER, STATEFUL, VALUE = "module", "optimizer", "stateful", "value"


def describe_structure(
    kind: str, state: Any = None, is_leaf: Callable[[Any], bool] | None = None, **more: Any
) -> dict[str, Any]:
    """Return the description of an object.

    Args:
        kind: MODULE, OPTIMIZER, STATEFUL or VALUE.
        state: The nested state that the names are those of.
        is_leaf: As given to names.walk_leaves().
        more: What else is to be known, where there is something.
    """
    found: dict[str, Any] = {"is": kind, **{key: each for key, each in more.items() if each}}
    return found if is_leaf is None else {**found, **describe_state(state, is_leaf)}


def describe_module(unusual: Mapping[str, Mapping[str, Any]] | None) -> Iterator[tuple[str, Any]]:
    """Yield names below a module and the descriptions that a checkpoint has there.

    Args:
        unusual: As read_unusual() gives it, by names.
    """
    root: dict[str, Any] = {"is": MODULE}
    # Beside each module and not in the one description: the ranks of a pipeline have other modules each.
    for name, said in (unusual or {}).items():
        if name:
            yield names.join_segments(name, KIND), {METADATA: dict(said)}
        else:
            root[METADATA] = dict(said)
    yield KIND, root | ({} if unusual is None else {IS_SAID: True})


def describe_state(state: Any, is_leaf: Callable[[Any], bool]) -> dict[str, Any]:
    """Return how a nested state is built, as far as names do not tell; empty where they tell everything."""
    aliases = [[list(path) for path in paths] for paths in find_aliases(state).groups]
    found = {"containers": describe_containers(state, is_leaf), "aliases": aliases}
    return {key: each for key, each in found.items() if each}


def describe_containers(state: Any, is_leaf: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the order and kinds of dictionaries of a nested state by their names, where these are not the usual."""
    found: dict[str, Any] = {}
    _describe_containers(state, is_leaf, "", found)
    return found


def build_structure(leaves: Mapping[str, Any], description: Mapping[str, Any] | None) -> Any:
    """Return the nested state whose leaves have these names, built as it was; `description`: None for an older one."""
    if description is None:
        return names.nest_leaves(leaves)
    containers: Mapping[str, Any] = description.get("containers", {})
    built = names.nest_leaves(leaves, lambda name, children: _build_dictionary(containers.get(name, {}), children))
    return share_objects(built, description.get("aliases", ()))


def _describe_containers(value: Any, is_leaf: Callable[[Any], bool], name: str, found: dict[str, Any]) -> None:
    if is_leaf(value):
        return
    pairs = names.list_children(value, is_leaf)
    if pairs is None:
        return
    if isinstance(value, dict):
        pieces = [piece for piece, _ in pairs]
        described: dict[str, Any] = {}
        if type(value) in (OrderedDict, Counter):
            described["empty"] = pack_value(type(value)())
        elif type(value) is defaultdict:
            described["empty"] = pack_value(defaultdict(value.default_factory))
        if pieces != sorted(pieces):
            described["order"] = pieces
        if type(value) is OrderedDict and (said := read_unusual(value)) is not None:
            described[METADATA] = said
        if described:
            found[name] = described
    for piece, child in pairs:
        if isinstance(child, dict | list | tuple):
            _describe_containers(child, is_leaf, names.join_segments(name, piece), found)


def _build_dictionary(described: Mapping[str, Any], children: Mapping[str, tuple[Any, Any]]) -> Any:
    """Return the dictionary of these children: by the piece of their names, keys and values."""
    ordered = [piece for piece in described.get("order", ()) if piece in children]
    built: Any = unpack_value(described["empty"]) if "empty" in described else {}
    for piece in (*ordered, *sorted(children.keys() - set(ordered))):
        key, value = children[piece]
        built[key] = value
    if METADATA in described:
        set_metadata(built, described[METADATA])
    return built
