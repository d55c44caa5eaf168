"""Random numbers that a stage's code draws beside torch's default ones: a forward that is done again draws the same.

Those of Python and numpy, and generators that modules, or objects in these, have as attributes, are put back. What
draws from others, as from a global variable, shows in the first recomputation: its results are compared with those of
the first forward.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from everstep.pipeline.errors import PipelineError

_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}  # relative to the largest number; 0.2 for what is narrower


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, dict, OrderedDict, list, tuple, set, frozenset})


class ScriptDraws:
    """The generators of Python, of numpy, and of the modules in a stage."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._globals = _find_global_generators(self._modules)

    def get_state(self) -> list[tuple[Any, Any]]:
        """Return what is given to `at` to draw the same numbers again."""
        found: list[Any] = [random]
        kinds: tuple[type, ...] = (torch.Generator, random.Random)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            found.append(numpy)
            kinds += (numpy.Generator, numpy.RandomState)
        # By their types: an object may say that it has any attribute, as dictionaries with attributes do.
        every = [each for each in _iterate_held(self._modules) if isinstance(each, kinds)]
        found += [each for each in every if not isinstance(each, random.SystemRandom)]  # which has no state
        found += self._globals
        return [(each, _get_state(each)) for each in found]

    def have_drawn(self, state: list[tuple[Any, Any]]) -> bool:
        """Tell whether Python's, numpy's or a module's own have drawn since `state`, beside torch's generators."""
        known = {id(each): pickle.dumps(own) for each, own in state if not isinstance(each, torch.Generator)}
        return any(known[id(each)] != pickle.dumps(_get_state(each)) for each, _ in state if id(each) in known)

    @contextlib.contextmanager
    def at(self, state: list[tuple[Any, Any]]) -> Iterator[None]:
        """Draw inside as from `state` on; afterwards all generators are where they were before."""
        before = [(each, _get_state(each)) for each, _ in state]
        try:
            for each, own in state:
                _set_state(each, own)
            yield
        finally:
            for each, own in before:
                _set_state(each, own)


def _iterate_held(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Return the attributes of modules, and those of the objects in them, but for what is plain: most of them are, and
    they are looked at in each forward that is done again."""
    seen = set[int]()
    for module in modules:
        for each in vars(module).values():
            if type(each) in _PLAIN:
                continue
            yield each
            if isinstance(each, nn.Module | torch.Tensor | type | ModuleType | FunctionType) or id(each) in seen:
                continue
            seen.add(id(each))
            own = getattr(each, "__dict__", None)
            if type(own) is dict:
                yield from own.values()


def _find_global_generators(modules: Sequence[nn.Module]) -> list[Any]:
    """The generators that the code of these modules, or of functions beside it that it calls, names as global
    variables."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kinds += (numpy.Generator, numpy.RandomState)
    found: dict[int, Any] = {}
    own = {each for module in modules for each in type(module).__mro__ if not each.__module__.startswith("torch.")}
    waiting = [each for kind in own for each in vars(kind).values() if isinstance(each, FunctionType)]
    seen = set[FunctionType]()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for name in _iterate_names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
                found[id(value)] = value
            elif isinstance(value, FunctionType) and value.__globals__ is function.__globals__:  # of the same file
                waiting.append(value)
    return list(found.values())


def _iterate_names(code: CodeType) -> Iterator[str]:
    """All names in code, and in that of functions and comprehensions within it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _iterate_names(each)


def compare_recomputation(stage: int, first: Mapping[str, list[Any]], again: Mapping[str, list[Any]]) -> None:
    """Compare the tensors that a stage's forward gave with those that it gives when it is done again.

    Raises:
        PipelineError: If it is something else, and not only by rounding.
    """
    for name, tensors in first.items():
        for one, other in zip(tensors, again[name], strict=True):
            if one.shape == other.shape and (not one.is_floating_point() or _close_enough(one, other)):
                continue
            raise PipelineError(
                f"stage {stage} gives another value {name!r} when its forward is done again, so its gradients would be "
                "of something else than its losses: its code draws random numbers from a generator that no module has "
                "as an attribute, or changes what it keeps. Draw from torch's default generator, or leave the stage "
                "out of EngineOptions.recompute"
            )


def _close_enough(one: torch.Tensor, other: torch.Tensor) -> bool:
    largest = float(one.abs().max()) if one.numel() else 0.0
    tolerance = _TOLERANCE.get(one.dtype, 0.2) * largest
    return tolerance != tolerance or bool(torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True))


def _get_state(generator: Any) -> Any:
    if hasattr(generator, "get_state"):  # torch's, and the functions of numpy
        return generator.get_state()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "set_state"):
        generator.set_state(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)
