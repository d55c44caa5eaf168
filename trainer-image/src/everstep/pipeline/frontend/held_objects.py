"""Attributes of objects that are no modules, as of a configuration in `self.config`, that a forward reads.

Python tells nobody what is read of them. So while a forward is recorded, the classes of such objects do.
"""

from __future__ import annotations

import contextlib
import enum
import numbers
from collections.abc import Callable, Iterable, Iterator
from operator import is_not
from typing import Any

import torch
from torch import nn

_CHANGEABLE = 1 << 9  # of a class, Py_TPFLAGS_HEAPTYPE: it is made by Python
_NOT_OURS = ("torch", "logging", "threading", "weakref", "collections", "numpy")
_DEEP = 4  # objects in one another
_MANY = 1_000  # objects in a container

# Of the names from the module on, with dots between them; the value; and whether the object holds it itself.
Note = Callable[[str, Any, bool], None]


class Mark(enum.Enum):
    """Stands for what a module or an object does not hold itself."""

    OF_CLASS = "that of its class"  # a method, until a script puts something in its place
    ABSENT = "not there"  # what code asks for by `hasattr`, or by `getattr` with a default

    def __repr__(self) -> str:
        return str(self.value)


class HeldObjects:
    """The objects that attributes of modules hold, while they are listened to.

    Args:
        is_busy: Tells whether what happens now is none of the forward's.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._known: dict[int, tuple[Any, dict[str, Any], str, Note]] = {}
        self._items: list[tuple[Any, Any]] = []
        self._before: dict[type, dict[str, Any]] = {}

    def watch(self, held: Any, name: str, note: Note) -> None:
        """Listen to what is read of an object, and of the objects in it.

        Args:
            held: The object, or a container of objects; nothing is done for others.
            name: Of the attributes that lead to it.
            note: Called with each value that is read, or with the mark of what is not there.
        """
        if name.count(".") >= _DEEP:
            return
        if isinstance(held, list | tuple | dict):
            for key, each in iterate_items(held) if len(held) <= _MANY else ():
                self.watch(each, f"{name}.{key}", note)
            return
        kind = type(held)
        if id(held) in self._known or not can_be_watched(held):
            return
        with contextlib.suppress(TypeError, AttributeError):  # of a class that cannot be changed
            if kind not in self._before:
                self._patch(kind)
            own = dict(_own_of(held))
            self._known[id(held)] = held, own, name, note
            self._items += [(each, each.copy()) for each in own.values() if type(each) in (list, dict)]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen inside; classes are afterwards what they were."""
        try:
            yield
        finally:
            for kind, methods in self._before.items():
                for name, method in methods.items():
                    with contextlib.suppress(TypeError, AttributeError):  # it was not changed either
                        if method is None:
                            delattr(kind, name)
                        else:
                            setattr(kind, name, method)
            self._before.clear()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore at the end what the objects hold: a table that a forward has made would be a tensor without data.

        Only what has changed is put back, as other threads may read the rest.
        """
        try:
            yield
        finally:
            for held, before, _, _ in self._known.values():
                own = _own_of(held)
                for name in own.keys() - before.keys():
                    own.pop(name, None)
                for name, value in before.items():
                    if own.get(name, Mark.ABSENT) is not value:
                        own[name] = value
            for items, copy in self._items:
                if len(items) != len(copy) or any(map(is_not, _values_of(items), _values_of(copy))):
                    items.clear()
                    (items.extend if isinstance(items, list) else items.update)(copy)
            self._known.clear()
            self._items.clear()

    def _patch(self, kind: type) -> None:
        # Of the classes, since a metaclass may have methods of these names, which are for the class alone.
        found = {name: of_class(kind, name) for name in ("__getattribute__", "__getattr__")}
        methods = {name: method for name, method in found.items() if method is not Mark.ABSENT}
        before = self._before[kind] = dict[str, Any]()
        for method, original in methods.items():
            is_last = method == [*methods][-1]

            def read(held: Any, name: str, original: Any = original, is_last: bool = is_last) -> Any:
                try:
                    value = original(held, name)
                except AttributeError:
                    if is_last and type(held) is kind:  # of those that it derives from, nobody knows what follows
                        self._hear(held, name, Mark.ABSENT)
                    raise
                self._hear(held, name, value)
                return value

            before[method] = vars(kind).get(method)
            setattr(kind, method, read)

    def _hear(self, held: Any, name: str, value: Any) -> None:
        if name.startswith("__") or id(held) not in self._known or self._is_busy():
            return
        _, own, path, note = self._known[id(held)]
        if name in own and own[name] is not value:
            return  # this forward has written it
        if not can_be_watched(value):
            note(f"{path}.{name}", value, name in own)
        self.watch(value, f"{path}.{name}", note)


def iterate_items(held: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what is in a list, a tuple or a dictionary, with the keys that can be part of a name."""
    if isinstance(held, dict):
        yield from ((key, each) for key, each in held.items() if isinstance(key, str) and "." not in key)
    else:
        yield from enumerate(held)


def _values_of(held: Any) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held


def of_class(kind: type, name: str) -> Any:
    """Return what a class says about an attribute that its object does not hold; a property is its own code."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), Mark.ABSENT)


def _own_of(held: Any) -> dict[str, Any]:
    """Return what an object holds itself, whatever its class says of it."""
    try:
        found: dict[str, Any] = object.__getattribute__(held, "__dict__")
    except AttributeError:  # it has slots
        return {}
    return found


def can_be_watched(held: Any) -> bool:
    """Tell whether it is an object of a class of Python's, as a configuration is, and none that is called by torch."""
    kind = type(held)
    return (
        not isinstance(held, torch.Tensor | nn.Module | type)
        and bool(kind.__flags__ & _CHANGEABLE)
        and kind.__module__.partition(".")[0] not in _NOT_OURS
        and not isinstance(held, dict | list | tuple | set | frozenset | str | numbers.Number | enum.Enum)
    )
