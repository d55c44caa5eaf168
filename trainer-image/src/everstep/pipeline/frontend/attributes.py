"""Python attributes that a forward reads: a trace sees one value of each, which a model that is cut keeps for ever.

A module that is never cut runs its own forward, and reads what its attributes are then. The code of all others may be
opened by a cut, and which of them are depends on what a machine measured. So an attribute that such code reads is
fixed wherever the cut falls, and a step with another value is refused. What is no plain value, as a tensor that is no
buffer, a function or a configuration, is fixed as the object that it was; of objects of Python's own classes, so are
the plain values that are read of them.
"""

from __future__ import annotations

import enum
import numbers
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.held_objects import CONTAINERS, HeldObjects, Mark, iterate_items, of_class, state_of

Key = tuple[str, str]  # the path of a module, and the name of its attribute
Reader = tuple[str, str]  # the path of a module whose code reads the training flag of another, and that one's
_OF_EVERY_MODULE, _METHODS = frozenset(vars(nn.Module())), frozenset(vars(nn.Module))
_SCALARS = (type(None), numbers.Number, str, bytes, enum.Enum, torch.dtype, torch.device)
_MANY = 10_000  # elements of a container that are compared at each step
_NOT_PLAIN = object()

_WITH_DATA = (torch.Tensor, nn.Parameter)  # and not those of a trace


_OF_CLASS, _ABSENT = Mark.OF_CLASS, Mark.ABSENT


@dataclass(frozen=True, eq=False)
class _HeldObject:
    """An object that is no plain value; equal to one of the same object, or of a tensor with the same numbers."""

    held: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _HeldObject):
            return False
        one, two = self.held, other.held
        if is_array(one) and is_array(two):  # a copy, since an array may be changed in place
            return are_arrays_equal(one, two)
        return one is two or (
            type(one) in _WITH_DATA
            and type(two) in _WITH_DATA
            and "meta" not in (one.device.type, two.device.type)
            and (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
            and torch.equal(one, two)
        )

    def __repr__(self) -> str:
        return repr(self.held)


@dataclass
class AttributeRead:
    """A value that was read. `during`: by the names of the calls that were under way, the outermost first."""

    value: Any
    during: set[tuple[str, ...]] = field(default_factory=set)


class AttributeReads:
    """The attributes of a model's modules that one forward reads, as they were before it.

    `found`: those that it leaves as they are, plain ones and `objects`. `changed`: plain ones that it changes, with the
    values before and after, where nothing says that they are about something that the module keeps, as a table with a
    flag that it is there; `unsure`: those where something does. `left`: all attributes, plain ones or not, read or not,
    that hold something else after it. `modes`: the training flags of other modules than the one whose code reads them,
    with its own. `modes_after`: the training flags that it leaves, by the paths of modules; `set_modes`: the paths of
    those that it has set. `given`: what is read of objects among the arguments.
    """

    def __init__(self, model: nn.Module, is_busy: Callable[[], bool] = lambda: False) -> None:
        self.held_objects = HeldObjects(is_busy)
        self._modules = {id(module): (path, module, dict(vars(module))) for path, module in model.named_modules()}
        self._items = {key: _list_items(vars(module)) for key, (_, module, _) in self._modules.items()}
        self._hooks = self._count_hooks()
        self.found: dict[Key, AttributeRead] = {}
        self.objects: dict[Key, AttributeRead] = {}
        self.changed: dict[Key, tuple[Any, Any]] = {}
        self.unsure: dict[Key, tuple[Any, Any]] = {}
        self.left: set[Key] = set()
        self.modes: dict[Reader, AttributeRead] = {}
        self.modes_after: dict[str, bool] = {}
        self.set_modes: set[str] = set()
        self.given: dict[str, AttributeRead] = {}
        self._given: Mapping[str, Any] = {}

    def _count_hooks(self) -> int:
        modules = (module for _, module, _ in self._modules.values())
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)

    def watch_arguments(self, given: Mapping[str, Any], stack: Sequence[Any]) -> None:
        """Listen to what is read of objects among the arguments of the model; it goes to `given`.

        Args:
            given: The arguments by name.
            stack: The calls that are under way, now and later.
        """
        self._given = given
        for name, value in given.items():
            self.held_objects.watch(value, name, partial(self._note_given, stack))

    def _note_given(self, stack: Sequence[Any], name: str, value: Any, is_own: bool) -> None:
        if value is _ABSENT or is_own or plain_copy(value) is not _NOT_PLAIN:
            read = self.given.setdefault(name, AttributeRead(value if value is _ABSENT else held_copy(value)))
            read.during.add(tuple(call.name for call in stack))

    def note(self, module: nn.Module, name: str, value: Any, stack: Sequence[Any]) -> None:
        """Note that an attribute was read while these calls were under way, unless this forward has written it."""
        if id(module) not in self._modules:
            self.held_objects.hear(module, name, value)
            return
        path, _, before = self._modules[id(module)]
        if name == "training" and stack[-1].path != path:
            read = self.modes.setdefault((stack[-1].path, path), AttributeRead((stack[-1].training, value)))
            read.during.add(tuple(call.name for call in stack))
        if _is_of_every_module(name, before):
            return
        key = path, name
        if key not in self.found and key not in self.objects:
            held = before.get(name, _ABSENT)
            if held is _ABSENT and name not in vars(module):
                held = of_class(type(module), name)
            plain = plain_copy(held) if isinstance(value, _PLAIN) else _NOT_PLAIN
            if plain is not _NOT_PLAIN:
                if held is not value and plain != plain_copy(value):  # what is no number is not equal to itself
                    return
                self.found[key] = AttributeRead(plain)
                self.held_objects.watch(held, name, partial(self._note_part, path, stack))
            elif held is value:
                self.objects[key] = AttributeRead(held_copy(held))
                self.held_objects.watch(held, name, partial(self._note_part, path, stack))
            elif callable(value) and name not in vars(module):
                self.objects[key] = AttributeRead(_OF_CLASS)
            else:
                return
        read = self.found.get(key) or self.objects[key]
        read.during.add(tuple(call.name for call in stack))

    def _note_part(self, path: str, stack: Sequence[Any], name: str, value: Any, is_own: bool) -> None:
        """Note that something of an object was read which a module holds, or asked for; what is not plain only where
        the object has it itself, as others are made anew each time."""
        if value is _ABSENT or is_own or plain_copy(value) is not _NOT_PLAIN:
            copy = value if value is _ABSENT else held_copy(value)
            read = self.objects.setdefault((path, name), AttributeRead(copy))
            read.during.add(tuple(call.name for call in stack))

    def note_absence(self, module: nn.Module, name: str, stack: Sequence[Any]) -> None:
        """Note that an attribute was asked for which is not there, and was not before."""
        if id(module) in self._modules and not _has(module, name):
            path, _, before = self._modules[id(module)]
            if name not in before:
                read = self.found.setdefault((path, name), AttributeRead(_ABSENT))
                read.during.add(tuple(call.name for call in stack))

    def settle(self) -> None:
        """Tell apart what the forward, which has ended, has changed. Called before its changes are undone."""
        modules = {path: module for path, module, _ in self._modules.values()}
        # A first call that registers hooks, as of transformers for hidden states, leaves a flag that they are there.
        registers = self._count_hooks() != self._hooks
        for number, (path, module, before) in self._modules.items():
            now = vars(module)
            if "training" in now:  # torch.compile's wrapper has the flag of its module
                self.modes_after[path] = now["training"]
                if now["training"] != before["training"]:
                    self.set_modes.add(path)
            items = _list_items(now)
            self.left |= {
                (path, name)
                for name, value in now.items()
                if not _is_of_every_module(name, now)
                and (value is not before.get(name, _ABSENT) or items.get(name) != self._items[number].get(name))
            }
            mine = {name: read.value for (of, name), read in self.found.items() if of == path}
            after = {name: plain_copy(now[name]) for name in mine if name in now}
            keeps = any(value is _NOT_PLAIN for value in after.values()) or any(
                value is not before.get(name, _ABSENT) and plain_copy(value) is _NOT_PLAIN
                for name, value in now.items()
                if not _is_of_every_module(name, now)
            )
            for name, value in after.items():
                if value is _NOT_PLAIN or (value is not mine[name] and value != mine[name]):
                    del self.found[path, name]
                    is_flag = registers and isinstance(value, bool)
                    (self.unsure if keeps or is_flag else self.changed)[path, name] = mine[name], value
        for key, read in self.objects.items():
            if key not in self.left and is_as_it_was(modules[key[0]], key[1], read.value):
                self.found[key] = read
        self.given = {name: read for name, read in self.given.items() if is_as_it_was(self._given, name, read.value)}


class FixedAttributes:
    """The attributes that a cut has fixed, and what they were; `autocast`, the type to which all was cast meanwhile."""

    def __init__(self, model: nn.Module, values: Mapping[Key, Any], autocast: torch.dtype | None = None) -> None:
        self.autocast = autocast
        self._held = [(path, name, model.get_submodule(path), value) for (path, name), value in values.items()]
        self._stand_ins: list[tuple[str, str, nn.Module, Any]] = []

    def watch(self, parts: Sequence[nn.Module]) -> None:
        """Look at these modules too, which stand for the model or for parts of it: a script may set it there."""
        for path, name, module, value in self._held:
            for part in parts:
                try:
                    found = part.get_submodule(path)
                except AttributeError:
                    continue  # it has nothing of that module
                if found is not module and name not in vars(found):
                    self._stand_ins.append((path, name, found, value))

    def check(self) -> None:
        """Compare all of them with what they were.

        Raises:
            PipelineError: If one is another, with its module, and with both values.
        """
        for path, name, module, value in self._held:
            if not is_as_it_was(module, name, value):
                raise _make_changed_error(path, name, module, value, _get(module, name))
        for path, name, module, value in self._stand_ins:
            now = vars(module).get(name, _ABSENT)
            if now is not _ABSENT and held_copy(now) != value:
                raise _make_changed_error(path, name, module, value, now)


def plain_copy(value: Any, around: frozenset[int] = frozenset()) -> Any:
    """Return a copy of a number, a text, or a container of them, that stays as it is; else what equals no copy.
    `around`: the ids of the containers that it is in, of which it may be one."""
    if isinstance(value, _SCALARS):
        return value
    if id(value) in around:
        return _NOT_PLAIN
    around |= {id(value)}
    if isinstance(value, _CONTAINERS) and len(value) <= _MANY:
        items = [plain_copy(each, around) for each in value]
        if any(each is _NOT_PLAIN for each in items):
            return _NOT_PLAIN
        kind = next(kind for kind in _CONTAINERS if isinstance(value, kind))
        return kind(items)
    if isinstance(value, dict) and len(value) <= _MANY:
        found = {_copy_key(key): plain_copy(each, around) for key, each in value.items()}
        return _NOT_PLAIN if any(each is _NOT_PLAIN for each in found.values()) else found
    return _NOT_PLAIN


def _copy_key(key: Any) -> Any:
    """Return a key of a table; a size as the number that it has become, since torch gives sizes no hash."""
    if isinstance(key, torch.SymInt):
        return int(key)
    return tuple(map(_copy_key, key)) if isinstance(key, tuple) else key


def held_copy(value: Any, around: frozenset[int] = frozenset()) -> Any:
    """Return what equals that of the same value later on: of a plain one a copy, of others that they are the same
    objects. `around`: the ids of what it is in, of which it may be one."""
    if (plain := plain_copy(value)) is not _NOT_PLAIN:
        return plain
    if id(value) in around:
        return _HeldObject(value)
    around |= {id(value)}
    if isinstance(value, list | tuple | deque) and len(value) <= _MANY:
        return [held_copy(each, around) for each in value]
    if isinstance(value, dict) and len(value) <= _MANY:
        return {_copy_key(key): held_copy(each, around) for key, each in value.items()}
    if isinstance(value, SimpleNamespace):  # which no Python code reads, and so nobody hears of
        return held_copy(vars(value), around)
    if isinstance(value, partial):
        return [held_copy(each, around) for each in (value.func, value.args, value.keywords)]
    return _HeldObject(value.copy() if is_array(value) and value.size <= _MANY else value)


def is_plain(value: Any) -> bool:
    """Tell whether it is a number, a text, or a container of them."""
    return plain_copy(value) is not _NOT_PLAIN


def is_as_it_was(module: Any, name: str, value: Any) -> bool:
    """Tell whether what a name leads to, from a module or a dictionary on, is what `held_copy` has given, or a mark."""
    if value is _OF_CLASS:
        around, _, last = name.rpartition(".")
        return last not in state_of(_get(module, around) if around else module)
    if value is _ABSENT and "." not in name:
        return not _has(module, name)
    now = _get(module, name)
    return now is value or bool(held_copy(now) == value)


def _get(module: Any, name: str) -> Any:
    """Return an attribute, or one of an object that it holds, by names with dots between them."""
    found: Any = module
    for each in name.split("."):
        if isinstance(found, CONTAINERS):
            item = next((item for key, item in iterate_items(found) if key == each), _ABSENT)
            if item is not _ABSENT:
                found = item
                continue
        try:
            found = getattr(found, each, _ABSENT)
        except Exception:  # of a property that has a value in a forward only, say
            return _ABSENT
    return found


def _has(module: nn.Module, name: str) -> bool:
    """Tell whether a module or its class holds something by this name; what a `__getattr__` of its own finds elsewhere
    is read there."""
    held = vars(module)
    parts = (held, *(held.get(each, ()) for each in ("_parameters", "_buffers", "_modules")))
    return any(name in part for part in parts) or of_class(type(module), name) is not _ABSENT


def _is_of_every_module(name: str, held: Mapping[str, Any]) -> bool:
    """Tell whether an attribute is one of torch's, and not one that a module holds by the name of a method, as
    `type`."""
    return name in _OF_EVERY_MODULE or (name in _METHODS and (name == "forward" or name not in held))


def is_array(value: Any) -> bool:
    """Tell whether a value is an array of numpy's own, of numbers."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray" and not value.dtype.hasobject


def are_arrays_equal(one: Any, two: Any) -> bool:
    """Tell whether two arrays have the same numbers, of the same type and shape."""
    return bool(one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes())


_CONTAINERS = (list, tuple, set, frozenset, deque)
_PLAIN = (*_SCALARS, *_CONTAINERS, dict)


def _list_items(held: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return which objects are in each container, which may get others without being another one."""
    return {
        name: [id(each) for each in (value.values() if isinstance(value, dict) else value)]
        for name, value in held.items()
        if isinstance(value, list | dict | set | deque) and not _is_of_every_module(name, held)
    }


def _make_changed_error(path: str, name: str, module: nn.Module, value: Any, now: Any) -> PipelineError:
    where = f"module {path!r}" if path else "the model"
    shown = "gone" if now is _ABSENT else f"{now!r:.80}"
    return PipelineError(
        f"{where} has another attribute {name!r} than when pipeline() traced it: it was {value!r:.80}, and is {shown}; "
        "the stages have what forward reads of Python attributes as it was then: give it to forward as an argument "
        "that is a tensor, or register it as a buffer and change that in place, or call pipeline() again"
    )


def changes_itself(model: nn.Module, key: Key, before: Any, after: Any, count: float | None = None) -> PipelineError:
    """Return the error for a forward that does something else because it has changed an attribute: the next time, or
    when that is `count`."""
    path, name = key
    module = model.get_submodule(path)
    where = f"module {path!r} ({type(module).__name__})" if path else f"the model ({type(module).__name__})"
    when = "the next time" if count is None else f"when it is {count}"
    return PipelineError(
        f"{where} changes its own attribute {name!r} in forward (from {before!r:.80} to {after!r:.80}), and does "
        f"something else {when}: a pipeline calls forward once for each micro-batch, or not at all where it is "
        "cut; count in the script, and give forward the number as an argument that is a tensor, or make it a buffer"
    )
