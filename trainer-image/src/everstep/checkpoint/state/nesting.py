"""Limit how deep a state may be nested.

What is saved must be read back, and a reader needs a few calls for each level.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from everstep.checkpoint.format.values import UnsupportedValue
from everstep.checkpoint.state import names

DEEPEST = 100  # containers within each other; of Python's 1,000 calls a reader takes up to four for each

_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})  # a generator's state of 600 numbers is passed at once


def check_nesting(state: Any, name: str) -> None:
    """See that a state is not nested deeper than readers can follow. Calls nothing of itself, however deep that is.

    Args:
        state: Any value.
        name: What it is called in messages.

    Raises:
        UnsupportedValue: It is nested deeper than DEEPEST, or holds itself; names the entry in which.
    """
    waiting = [(state, 1, "")] if isinstance(state, _CONTAINERS) else []
    seen: dict[int, int] = {}  # at which depth a container was met last
    while waiting:
        container, depth, top = waiting.pop()
        if depth > DEEPEST:
            raise UnsupportedValue(
                names.join_segments(name, top),
                f"is nested more than {DEEPEST} deep, or holds itself: a checkpoint holds {DEEPEST} dictionaries, "
                "lists and tuples within each other; keep it as a flat list or dictionary, or as bytes",
            )
        if seen.get(id(container), 0) >= depth:
            continue
        seen[id(container)] = depth
        waiting += [(child, depth + 1, top or piece) for piece, child in _list_containers(container)]


def _list_containers(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the containers in one, and the names of their places."""
    if isinstance(container, dict):
        for key, child in container.items():
            if isinstance(key, tuple | frozenset):
                yield repr(type(key).__name__), key
            if isinstance(child, _CONTAINERS):
                yield names.escape_segment(key) if type(key) is str else f"#{key}" if type(key) is int else "#", child
    elif not _PLAIN.issuperset(map(type, container)):
        for place, child in enumerate(container):
            if isinstance(child, _CONTAINERS):
                yield f"({place})" if isinstance(container, tuple) else f"[{place}]", child
