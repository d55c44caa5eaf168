"""Patch torch to report what it does not tell a tracer: calls of modules and of custom functions, and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction, checkpoint


class AttributeListener(Protocol):
    """`busy`: whether what happens now is inside something that is recorded already."""

    busy: bool

    def attribute(self, module: nn.Module, name: str, value: Any) -> None: ...
    def absence(self, module: nn.Module, name: str) -> None: ...


class RecordingListener(AttributeListener, Protocol):
    """It hears of calls too."""

    autocasts: list[tuple[str, Any, bool]]
    seeded: bool
    drawn: bool

    def call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any: ...
    def function(self, cls: Any, apply: Any, args: Any, kwargs: Any) -> Any: ...


@contextlib.contextmanager
def listen_to_model(listener: RecordingListener) -> Iterator[None]:
    """Report to the listener, while inside, what this process does.

    It hears of every module call, attribute of a module that is read, custom function and autocast.
    """
    with (
        _patch_module_calls(listener),
        listen_to_attributes(listener),
        _patch_custom_functions(listener),
        _patch_conversions(listener),
        _patch_autocast(listener),
        _Draws(listener),
    ):
        yield


@contextlib.contextmanager
def _patch_module_calls(listener: RecordingListener) -> Iterator[None]:
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if listener.busy:
            return original(module, *args, **kwargs)
        return listener.call(original, module, args, kwargs)

    nn.Module.__call__ = call
    try:
        yield
    finally:
        nn.Module.__call__ = original


@contextlib.contextmanager
def listen_to_attributes(listener: AttributeListener) -> Iterator[None]:
    """Report to the listener, while inside, which attributes of modules are read, or asked for and not there."""
    plain = object.__getattribute__

    def read(module: nn.Module, name: str) -> Any:
        try:
            value = plain(module, name)
        except AttributeError:  # Python itself then asks `__getattr__` for it
            if not listener.busy and not name.startswith("__"):
                listener.absence(module, name)
            raise
        if not listener.busy and not name.startswith("__"):
            listener.attribute(module, name, value)
        return value

    nn.Module.__getattribute__ = read
    try:
        yield
    finally:
        del nn.Module.__getattribute__


@contextlib.contextmanager
def _patch_custom_functions(listener: RecordingListener) -> Iterator[None]:
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        if listener.busy:
            return bound(*args, **kwargs)
        if cls is CheckpointFunction:  # only the way its backward goes differs from a plain call
            with _learning_as_reentrant(args[2:]):
                return args[0](*args[2:])
        return listener.function(cls, bound, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


@contextlib.contextmanager
def _patch_conversions(listener: RecordingListener) -> Iterator[None]:
    """Let a `module.to(…)` in forward that changes nothing do nothing: for tensors without data, torch would put other
    parameters in the place of the module's own."""
    original = nn.Module._apply

    def apply(module: nn.Module, function: Any, recurse: bool = True) -> Any:
        if not listener.busy:
            tensors = [*module.parameters(recurse), *module.buffers(recurse)]
            listener.busy = True
            try:
                with _disable_current_modes(), torch.no_grad():
                    if all(function(each) is each for each in tensors):
                        return module
            finally:
                listener.busy = False
        return original(module, function, recurse)

    nn.Module._apply = apply
    try:
        yield
    finally:
        nn.Module._apply = original


@contextlib.contextmanager
def divisible_checkpoints() -> Iterator[None]:
    """Activation checkpoints inside that are reentrant, whose backward cannot be asked for a part of the gradients, are
    made the other way. What they recompute learns where it does in torch's."""

    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        with _learning_as_reentrant(args):
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    if "apply" in CheckpointFunction.__dict__:
        yield
        return
    CheckpointFunction.apply = staticmethod(apply)
    try:
        yield
    finally:
        del CheckpointFunction.apply


def _learning_as_reentrant(args: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Without gradients where a reentrant checkpoint has none, also for its parameters: torch records its backward
    only if one of the tensors that it is given itself, and not in a list, requires gradients."""
    has_gradient = any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
    return contextlib.nullcontext() if has_gradient else torch.no_grad()


@contextlib.contextmanager
def _patch_autocast(listener: RecordingListener) -> Iterator[None]:
    kind = torch.amp.autocast_mode.autocast
    enter, leave = kind.__enter__, kind.__exit__

    def entered(self: Any) -> Any:
        listener.autocasts.append((self.device, self.fast_dtype, self._enabled))
        return enter(self)

    def left(self: Any, *reason: Any) -> Any:
        listener.autocasts.pop()
        return leave(self, *reason)

    kind.__enter__, kind.__exit__ = entered, left
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave


class _Draws(TorchDispatchMode):  # type: ignore[misc]  # torch is not where types are checked
    """Says when an operation is of a kind that draws random numbers, and when it draws some."""

    def __init__(self, listener: RecordingListener) -> None:
        super().__init__()
        self.listener = listener

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.listener.seeded = True
            self.listener.drawn = self.listener.drawn or not _has_no_dropout(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _has_no_dropout(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation draws for its dropout alone, as attention does, and was given none."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool((args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)) == 0)
    return False
