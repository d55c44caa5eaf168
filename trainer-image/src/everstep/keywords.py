"""Say in a TypeError where an unknown keyword belongs: a function's usual options are keywords, others are grouped."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def explain_keywords(**groups: type[Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function say which of its dataclasses of options has a keyword that it does not have itself.

    Args:
        groups: For each parameter that takes a dataclass of options, that dataclass.

    Returns:
        A decorator. It changes the function's TypeError for an unknown keyword, and nothing else.
    """
    options = {param: {each.name for each in fields(group)} for param, group in groups.items()}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters.keys()
        name_of_call = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - known:
                for param, names in options.items():
                    found = next((each for each in (name, name.removeprefix(f"{param}_")) if each in names), None)
                    if found is not None:
                        where = f"{param}={groups[param].__name__}({found}=…)"
                        raise TypeError(f"{name_of_call}() has no keyword {name!r}: give it as {where}")
            return function(*args, **kwargs)

        return call

    return decorate
