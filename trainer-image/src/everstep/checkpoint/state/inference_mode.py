"""Restores that are called within torch.inference_mode(), as a script does that evaluates before it trains.

A tensor that is made there can never be trained: an optimizer's state would fail at the next step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from everstep.checkpoint.state.aliases import list_objects
from everstep.checkpoint.state.kinds import unwrap_marked

P = ParamSpec("P")
T = TypeVar("T")


def making_normal_tensors(call: Callable[P, T]) -> Callable[P, T]:
    """Return a function that makes no inference tensors where it is called within torch.inference_mode().

    Where the objects among its keyword arguments are themselves of such tensors, as a model that was built there to
    evaluate it, it stays in that mode: nothing else may write into them.
    """

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return call(*args, **kwargs)
        with torch.inference_mode(any(map(_is_of_inference, kwargs.values()))):
            return call(*args, **kwargs)

    return called


def _is_of_inference(each: object) -> bool:
    return any(isinstance(tensor, torch.Tensor) and tensor.is_inference() for tensor in _iterate_tensors(each))


def _iterate_tensors(each: object) -> Iterator[Any]:
    inner = unwrap_marked(each)
    if isinstance(inner, nn.Module):
        yield from inner.parameters()
        yield from inner.buffers()
    elif isinstance(inner, torch.optim.Optimizer):
        yield from (param for group in inner.param_groups for param in group["params"])
    elif isinstance(inner, list | tuple) and any(isinstance(one, nn.Module) for one in inner):
        for one in inner:
            yield from _iterate_tensors(one)
    elif isinstance(inner, torch.Tensor | dict | list | tuple):
        yield from list_objects(inner)
