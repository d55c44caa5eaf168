"""Tables that code keeps beside its modules, by `functools.cache`, in dictionaries or in objects, as for each length.

While a model runs on tensors without data, such a table would be one without data, and stay so: modules that run as
they are would find it in a step. A size has no hash then; code that cannot do without its table may use one as a key.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from everstep.pipeline.frontend.held_objects import can_be_watched

_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque)
_EVERY_MODULE = frozenset(vars(nn.Module()))
_DEEP, _MANY = 5, 10_000
_NOT_OURS = {"torch", "sympy", "mpmath", "numpy", "everstep", *sys.stdlib_module_names}


class KeptTables:
    """The places where the code of a model may keep tables.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._keyed = model, set[CodeType]()
        cached = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
        self._functions = [each for each in cached if _is_of_script(getattr(each, "__module__", None))]

    def learn_key(self, error: BaseException | None) -> bool:
        """Let the code that has failed, since a size has no hash, take sizes for keys from now on. False if this is not
        why, or if it may already."""
        if not isinstance(error, UnhashableSize) or error.code in self._keyed:
            return False
        self._keyed.add(error.code)
        return True

    @contextlib.contextmanager
    def kept(self, takes_keys: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Let no table without data stay that is made inside; others stay.

        Args:
            takes_keys: Tells whether a size may be a key of a table now. It is a number from then on, as by `int()`, so
                only where code cannot do without: other code, as einops, goes on without its table. By default none is.
        """
        asked = [(each, each.cache_info().misses) for each in self._functions]
        holders = [(held, held.copy()) for held in _iterate_holders(self._model)]
        try:
            with _hashable_sizes(lambda code: code in self._keyed and takes_keys()):
                yield
        finally:
            for function, misses in asked:
                if function.cache_info().misses != misses:
                    function.cache_clear()
            for held, before in holders:
                values = list(held.values() if isinstance(held, dict) else held)
                if any(map(_is_without_data, values)):
                    held.clear()
                    (held.update if isinstance(held, dict) else held.extend)(before)


class UnhashableSize(TypeError):
    """A size is hashed, which torch gives no hash; `code` is what hashes it."""

    def __init__(self, code: CodeType, *said: object) -> None:
        super().__init__(*said)
        self.code = code


@contextlib.contextmanager
def _hashable_sizes(is_key: Callable[[CodeType], bool]) -> Iterator[None]:
    kind: Any = torch.SymInt
    original = kind.__hash__

    def hashed(size: Any) -> int:
        known, code = size.node.maybe_as_int(), sys._getframe(1).f_code
        if known is None and is_key(code):
            known = int(size)
        if known is not None:
            return hash(known)
        try:
            return int(original(size))
        except TypeError as error:
            raise UnhashableSize(code, *error.args) from None

    kind.__hash__ = hashed
    try:
        yield
    finally:
        kind.__hash__ = original


def _is_without_data(value: Any) -> bool:
    """Tell whether a value of a table is a tensor without data, or has one in it, as cosines and sines."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, FakeTensor):
            return True
        if isinstance(each, dict | list | tuple) and id(each) not in seen:  # which may be in itself
            seen.add(id(each))
            waiting += each.values() if isinstance(each, dict) else each
    return False


def _is_of_script(name: Any) -> bool:
    return isinstance(name, str) and name.partition(".")[0] not in _NOT_OURS


def _iterate_holders(model: nn.Module) -> Iterator[Any]:
    """Yield the containers, and the attributes of objects, that modules, their classes and their code refer to."""
    waiting: list[tuple[Any, int]] = []
    kinds: dict[type, None] = {}
    for module in model.modules():
        waiting += [(value, 0) for name, value in vars(module).items() if name not in _EVERY_MODULE]
        kinds |= dict.fromkeys(each for each in type(module).__mro__ if _is_of_script(each.__module__))
    waiting += [(value, 0) for kind in kinds for value in vars(kind).values()]
    seen = set[int]()
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or depth > _DEEP:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            names = (name for name in value.__code__.co_names if name in value.__globals__)
            found = [value.__globals__[name] for name in names] if _is_of_script(value.__module__) else []
            found += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        elif type(value) in _CONTAINERS and len(value) <= _MANY:
            yield value
            found = list(value.values()) if isinstance(value, dict) else list(value)
        elif can_be_watched(value) and isinstance(getattr(value, "__dict__", None), dict):
            yield vars(value)
            found = list(vars(value).values())
        else:
            continue
        waiting += [(each, depth + 1) for each in found]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
