"""Attributes of objects that are no modules, as of a configuration in `self.config`, that a forward reads.

Python tells nobody what is read of them. So while a forward is recorded, the classes of such objects do.
"""

from __future__ import annotations

import contextlib
import enum
import numbers
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import is_not
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import nn

_CHANGEABLE = 1 << 9  # of a class, Py_TPFLAGS_HEAPTYPE: it is made by Python
_NOT_OURS = ("torch", "logging", "threading", "weakref", "numpy")
_DEEP = 20  # objects in one another
_MANY = 1_000  # objects in a container
_IN_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_EVERY_MODULE = (_IN_EVERY_MODULE | vars(nn.Module).keys()) - {"training", "forward"}

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
        self._containers: dict[int, Any] = {}
        self._items: list[tuple[Any, Any]] = []
        self._before: dict[type, dict[str, Any]] = {}

    def watch(self, held: Any, name: str, note: Note) -> None:
        """Listen to what is read of an object, and of the objects in it.

        Args:
            held: The object, a container of objects, what calls one (a bound method, a partial), or a module that is
                none of the model's own, as in a plain list; nothing is done for others.
            name: Of the attributes that lead to it.
            note: Called with each value that is read, or with the mark of what is not there.
        """
        if name.count(".") >= _DEEP:
            return
        if isinstance(held, MethodType):
            self.watch(held.__self__, f"{name}.__self__", note)
        elif isinstance(held, partial):
            for each in ("func", "args", "keywords"):
                self.watch(getattr(held, each), f"{name}.{each}", note)
        elif isinstance(held, nn.Module):
            for path, each in held.named_modules():
                self._know(each, f"{name}.{path}" if path else name, note)
            return
        if isinstance(held, CONTAINERS) and id(held) not in self._containers and len(held) <= _MANY:
            self._containers[id(held)] = held
            for key, each in iterate_items(held):
                self.watch(each, f"{name}.{key}", note)
        if id(held) not in self._known and can_be_watched(held):
            kind = type(held)
            with contextlib.suppress(TypeError, AttributeError):  # of a class that cannot be changed
                if kind not in self._before:
                    self._patch(kind)
                self._know(held, name, note)

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
                _put_back(held, before)
            for items, copy in self._items:
                if len(items) != len(copy) or any(map(is_not, _values_of(items), _values_of(copy))):
                    items.clear()
                    (items.extend if isinstance(items, list) else items.update)(copy)
            self._known.clear()
            self._containers.clear()
            self._items.clear()

    def hear(self, held: Any, name: str, value: Any) -> None:
        """Note what is read of an object, or of a module that is none of the model's own, if it is watched."""
        if name.startswith("__") or id(held) not in self._known or self._is_busy():
            return
        _, own, path, note = self._known[id(held)]
        if isinstance(held, nn.Module) and name in _OF_EVERY_MODULE and (name in _IN_EVERY_MODULE or name not in own):
            return
        if name in own and _raw_of(held, name) is not own[name]:
            return  # this forward has written it
        said = of_class(type(held), name)
        if name not in own and isinstance(said, FunctionType | staticmethod | classmethod) and callable(value):
            note(f"{path}.{name}", Mark.OF_CLASS, True)
            return
        if isinstance(value, CONTAINERS) or not can_be_watched(value):
            note(f"{path}.{name}", value, own.get(name, said) is value)
        self.watch(value, f"{path}.{name}", note)

    def _know(self, held: Any, name: str, note: Note) -> None:
        if id(held) not in self._known:
            own = state_of(held)
            self._known[id(held)] = held, own, name, note
            self._items += [(each, each.copy()) for each in own.values() if type(each) in (list, dict)]

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
                        self.hear(held, name, Mark.ABSENT)
                    raise
                self.hear(held, name, value)
                return value

            before[method] = vars(kind).get(method)
            setattr(kind, method, read)


CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def iterate_items(held: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in a container, with the parts of names that stand for it: keys, or places."""
    if isinstance(held, dict):
        for place, (key, each) in enumerate(held.items()):
            yield key if isinstance(key, str) and key and "." not in key else f"#{place}", each
    else:
        yield from ((str(place), each) for place, each in enumerate(held))


def _values_of(held: Any) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held


def of_class(kind: type, name: str) -> Any:
    """Return what a class says about an attribute that its object does not hold; a property is its own code."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), Mark.ABSENT)


def state_of(held: Any) -> dict[str, Any]:
    """Return what an object holds itself, whatever its class says of it, by names; also in slots."""
    slots = (name for kind in type(held).__mro__ for name in vars(kind).get("__slots__", ()) or ())
    found = {name: _raw_of(held, name) for name in slots if isinstance(name, str)}
    return {name: each for name, each in found.items() if each is not Mark.ABSENT} | _own_of(held)


def _raw_of(held: Any, name: str) -> Any:
    """Return what an object holds by a name, or the mark of what is not there."""
    own = _own_of(held)
    slot = of_class(type(held), name) if name not in own else None
    if not isinstance(slot, MemberDescriptorType):
        return own.get(name, Mark.ABSENT)
    try:
        return slot.__get__(held)
    except AttributeError:  # nothing was put there
        return Mark.ABSENT


def _put_back(held: Any, before: dict[str, Any]) -> None:
    own, now = _own_of(held), state_of(held)
    for name in now.keys() | before.keys():
        value, slot = before.get(name, Mark.ABSENT), of_class(type(held), name)
        if value is now.get(name, Mark.ABSENT):
            continue
        if name in own or not isinstance(slot, MemberDescriptorType):
            own.pop(name, None) if value is Mark.ABSENT else own.update({name: value})
        elif value is Mark.ABSENT:
            slot.__delete__(held)
        else:
            slot.__set__(held, value)


def _own_of(held: Any) -> dict[str, Any]:
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
        and not isinstance(held, str | numbers.Number | enum.Enum)
    )
