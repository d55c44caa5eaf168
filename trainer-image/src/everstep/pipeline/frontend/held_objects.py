"""Attributes of objects that are no modules, as of a configuration in `self.config`, that a forward reads.

Python tells nobody what is read of them. So while a forward is recorded, the classes of such objects do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_CHANGEABLE = 1 << 9  # of a class, Py_TPFLAGS_HEAPTYPE: it is made by Python
_NOT_OURS = ("torch", "logging", "threading", "weakref", "collections", "numpy")
_DEEP = 4  # objects in one another

Note = Callable[[str, Any], None]  # of the names from the module on, with dots between them, and the value


class HeldObjects:
    """The objects that attributes of modules hold, while they are listened to.

    Args:
        is_busy: Tells whether what happens now is none of the forward's.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._known: dict[int, tuple[Any, str, Note]] = {}
        self._before: dict[type, dict[str, Any]] = {}

    def watch(self, held: Any, name: str, note: Note) -> None:
        """Listen to what is read of an object, and of the objects in it.

        Args:
            held: The object; nothing is done for what is no such object.
            name: Of the attributes that lead to it.
            note: Called with each plain value that is read.
        """
        kind = type(held)
        if id(held) in self._known or not can_be_watched(held) or name.count(".") >= _DEEP:
            return
        with contextlib.suppress(TypeError, AttributeError):  # of a class that cannot be changed
            if kind not in self._before:
                self._patch(kind)
            self._known[id(held)] = held, name, note

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen inside; classes are afterwards what they were."""
        try:
            yield
        finally:
            for kind, methods in self._before.items():
                for name, method in methods.items():
                    if method is None:
                        delattr(kind, name)
                    else:
                        setattr(kind, name, method)
            self._before.clear()
            self._known.clear()

    def _patch(self, kind: type) -> None:
        before: dict[str, Any] = {}
        for method in ("__getattribute__", "__getattr__"):
            original = getattr(kind, method, None)
            if original is None:
                continue

            def read(held: Any, name: str, original: Any = original) -> Any:
                value = original(held, name)
                if not name.startswith("__") and id(held) in self._known and not self._is_busy():
                    self._hear(held, name, value)
                return value

            before[method] = vars(kind).get(method)
            setattr(kind, method, read)
        self._before[kind] = before

    def _hear(self, held: Any, name: str, value: Any) -> None:
        _, path, note = self._known[id(held)]
        if can_be_watched(value):
            self.watch(value, f"{path}.{name}", note)
        else:
            note(f"{path}.{name}", value)


def can_be_watched(held: Any) -> bool:
    """Tell whether it is an object of a class of Python's, as a configuration is, and none that is called by torch."""
    kind = type(held)
    return (
        not isinstance(held, torch.Tensor | nn.Module | type)
        and bool(kind.__flags__ & _CHANGEABLE)
        and kind.__module__.partition(".")[0] not in _NOT_OURS
        and not isinstance(held, dict | list | tuple | set | frozenset | str | int | float)
    )
