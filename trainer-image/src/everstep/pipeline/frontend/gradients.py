"""Take the hooks off the gradients of parameters where these gradients are not those of a step."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def without_hooks(parameters: Iterable[Any]) -> Iterator[None]:
    """Take the hooks off these parameters while inside; removing one of them meanwhile counts."""
    taken = [(each, each._backward_hooks, each._post_accumulate_grad_hooks) for each in parameters if has_hooks(each)]
    for parameter, _, _ in taken:
        # None would leave the latter on.
        parameter._backward_hooks, parameter._post_accumulate_grad_hooks = None, OrderedDict()
    try:
        yield
    finally:
        for parameter, hooks, after in taken:
            parameter._backward_hooks = hooks
            parameter._post_accumulate_grad_hooks = OrderedDict() if after is None else after


def has_hooks(parameter: Any) -> bool:
    """Return whether something listens to the gradient of the parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
