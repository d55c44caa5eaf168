"""Names of tensors and values: the path of a nested state, joined by dots.

A key that is text is itself, with `%`, `.`, `/` (and `#`, `[`, `(` at its beginning) as `%` and two hex digits, and an
empty one as `%`; an integer key is `#5`, another plain one `#` and its JSON as values have it (`#{"tuple":[1,2]}`), an
item of a list `[5]`, of a tuple `(5)`. So a name alone says where its leaf belongs. Pure: any leaf will do.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from everstep.checkpoint.format.values import UnsupportedValue, pack_value, unpack_value

_ESCAPED = re.compile(r"[%./]|^[#\[(]")
_MAYBE_ESCAPED = re.compile(_ESCAPED.pattern, re.MULTILINE)  # in keys that are joined by line ends
_PATH = re.compile(r"[%/]|(?:^|\.)(?:[#\[(]|\.|$)")  # where a path of text keys needs an escape
_ODD = re.compile(r"[.%]|^[#\[(]")  # in a name that is more than one key which is itself
_ESCAPE = re.compile(r"%([0-9A-F]{2})")
_ITEM = re.compile(r"\[(\d+)\]|\((\d+)\)", re.ASCII)
_INTEGER = re.compile(r"-?\d+", re.ASCII)

Build = Callable[[str, Mapping[str, tuple[Any, Any]]], Any]

# What no container holds anything in: a generator's state of 600 numbers is passed over at once.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


@functools.lru_cache(maxsize=4096)  # a state has few keys, and each of them many times
def escape_segment(key: str) -> str:
    """Return a key that is text, as a segment of a name."""
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", key) or "%"


def join_segments(*segments: str) -> str:
    """Segments as a name; empty ones (the object itself) are left out."""
    return ".".join(filter(None, segments))


def iterate_parents(name: str) -> Iterator[str]:
    """Yield the names of what a leaf lies in, but for the object that is the whole."""
    end = name.rfind(".")
    while end > 0:
        yield name[:end]
        end = name.rfind(".", 0, end)


def of_module(name: str) -> str:
    """Return the fully qualified name of a module's parameter: it is a path already, each piece a key."""
    return ".".join(map(escape_segment, name.split("."))) if _PATH.search(name) else name


def to_module(name: str) -> str:
    """Return the key of a module's state_dict for which of_module() gave this name."""
    return ".".join(map(_unescape_segment, name.split("."))) if "%" in name else name


def walk_leaves(value: Any, is_leaf: Callable[[Any], bool], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested state with their names.

    A dictionary is entered when all its keys are text, or when a leaf for which `is_leaf` holds is somewhere in it and
    its keys are plain values; a list, a tuple or another kind of dictionary (an OrderedDict) when such a leaf is in it.
    Anything else is one leaf, an empty container too. `is_leaf` holds for no number, text, bytes or None.
    """
    pairs = None if is_leaf(value) else list_children(value, is_leaf)
    if pairs is None:
        yield name, value
        return
    for piece, child in pairs:
        below = f"{name}.{piece}" if name else piece
        if type(child) in _PLAIN or is_leaf(child):
            yield below, child  # most of a state: a generator for each would take longer than all the rest
        else:
            yield from walk_leaves(child, is_leaf, below)


def list_children(value: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[str, Any]] | None:
    """Return the pieces of names and what they stand for, of a container that is entered; else None."""
    if isinstance(value, dict) and value and (type(value) is dict or _holds_leaf(value, is_leaf)):
        if all(type(key) is str for key in value):
            if not _MAYBE_ESCAPED.search("\n".join(value)) and "" not in value:
                return list(value.items())  # one look at all keys: a table of a user may have a hundred thousand
            return [(escape_segment(key), child) for key, child in value.items()]
        pieces = [name_key(key) for key in value] if _holds_leaf(value, is_leaf) else [None]
        if None not in pieces:
            return list(zip(map(str, pieces), value.values(), strict=True))
    elif type(value) is list and _holds_leaf(value, is_leaf):
        return [(f"[{i}]", child) for i, child in enumerate(value)]
    elif type(value) is tuple and _holds_leaf(value, is_leaf):
        return [(f"({i})", child) for i, child in enumerate(value)]
    return None


def name_key(key: Any) -> str | None:
    """Return a dictionary's key as a piece of a name; None where it has none."""
    if type(key) is str:
        return escape_segment(key)
    if type(key) is int:
        return f"#{key}"
    try:
        text = json.dumps(pack_value(key), sort_keys=True, separators=(",", ":"))
    except UnsupportedValue:
        return None
    return "#" + _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)


def _holds_leaf(value: Any, is_leaf: Callable[[Any], bool]) -> bool:
    if is_leaf(value):
        return True
    children: Iterable[Any] = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, (list, tuple)):
        children = value
    return any(_holds_leaf(child, is_leaf) for child in children if type(child) not in _PLAIN)


def nest_leaves(leaves: Mapping[str, Any], build: Build | None = None, name: str = "") -> Any:
    """Return the nested state whose leaves walk_leaves() gave these names; ValueError when they fit no state.

    Args:
        leaves: By their names.
        build: Makes a dictionary, given its name and, by the piece of its name, each key and value; a plain one by
            default.
        name: Of the state itself.
    """
    if "" in leaves:
        if len(leaves) == 1:
            return leaves[""]
        if leaves[""] is not None and (leaves[""] or not isinstance(leaves[""], dict | list | tuple)):
            raise ValueError(f"one name is a value and holds others: {sorted(leaves)[1]!r}")
        # Some ranks had nothing there, as a history of which one rank alone keeps account, and others what is in it.
        leaves = {each: leaf for each, leaf in leaves.items() if each}
    if build is None and not any(map(_ODD.search, leaves)):
        return dict(leaves)
    groups: dict[str, dict[str, Any]] = {}
    for full, leaf in leaves.items():
        first, _, rest = full.partition(".")
        groups.setdefault(first, {})[rest] = leaf
    return _build_container(
        {piece: nest_leaves(below, build, join_segments(name, piece)) for piece, below in groups.items()}, build, name
    )


def _build_container(children: dict[str, Any], build: Build | None, name: str) -> Any:
    found = [_ITEM.fullmatch(piece) for piece in children]
    if not any(found):
        items = {piece: (_parse_key(piece), child) for piece, child in children.items()}
        return dict(items.values()) if build is None else build(name, items)
    kinds = {each.lastindex if each else 0 for each in found}
    if len(kinds) != 1:
        raise ValueError(f"names of one container are of two kinds: {sorted(children)}")
    kind = kinds.pop() or 0
    ordered = {int(each[kind]): child for each, child in zip(found, children.values(), strict=True) if each}
    if sorted(ordered) != list(range(len(children))):
        raise ValueError(f"items of a list are missing: there are {sorted(children)}")
    listed = [ordered[i] for i in range(len(ordered))]
    return listed if kind == 1 else tuple(listed)


def _parse_key(piece: str) -> Any:
    if not piece.startswith("#"):
        return _unescape_segment(piece)
    if _INTEGER.fullmatch(piece, 1):
        return int(piece[1:])
    return unpack_value(json.loads(_unescape_segment(piece[1:])), piece)


def _unescape_segment(piece: str) -> str:
    return "" if piece == "%" else _ESCAPE.sub(lambda found: chr(int(found[1], 16)), piece)
