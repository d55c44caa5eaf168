"""What a model is called with, by the names of the arguments of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from everstep.pipeline.frontend.record import Untraceable


class Arguments:
    """Of one module. An example or a batch is a tensor, a tuple of positional arguments, or a mapping by names."""

    def __init__(self, module: Any) -> None:
        self._signature = inspect.signature(module.forward)
        kinds = {each.kind: name for name, each in self._signature.parameters.items()}
        self._rest = kinds.get(inspect.Parameter.VAR_KEYWORD)

    def name(self, given: Any) -> dict[str, Any]:
        """What was given by names, without what was left out. Untraceable if it does not fit."""
        args = () if isinstance(given, Mapping) else given if isinstance(given, tuple) else (given,)
        kwargs = given if isinstance(given, Mapping) else {}
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise Untraceable(f"the example does not fit the arguments of forward: {error}") from error
        named = dict(bound.arguments)
        extra = named.pop(self._rest, {}) if self._rest else {}
        return {**named, **extra}

    def fits(self, named: Mapping[str, Any]) -> bool:
        """Whether the module can be called with these names."""
        try:
            self._signature.bind(**named)
        except TypeError:
            return False
        return True

    def call(self, module: Any, named: Mapping[str, Any]) -> Any:
        """The module's result for arguments as `name` gives them."""
        own = {name: value for name, value in named.items() if name in self._signature.parameters}
        bound = inspect.BoundArguments(self._signature, own)
        rest = {name: value for name, value in named.items() if name not in self._signature.parameters}
        return module(*bound.args, **bound.kwargs, **rest)
