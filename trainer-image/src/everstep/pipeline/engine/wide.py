"""Gradients of bfloat16 parameters in float32, for as long as they are added up, reduced and scaled.

bfloat16 has eight significant bits: a sum of micro-batches loses what is below a 256th of it, each time. torch casts
what autograd gives to a parameter's `grad_dtype` before it is added. An optimizer gets a gradient in the parameter's
own type, which is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def widen_gradients(parameters: Iterable[Any]) -> None:
    """Let autograd add up the gradients of these parameters, which have none, in float32 where they are of bfloat16."""
    for parameter in parameters:
        if parameter.dtype is torch.bfloat16:
            parameter.grad_dtype = torch.float32


def narrow_gradients(parameters: Iterable[Any]) -> None:
    """Round the gradients of these parameters to the parameters' own types."""
    for parameter in parameters:
        if parameter.dtype is torch.bfloat16 and parameter.grad_dtype is torch.float32:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)


def dtype_of_gradient(parameter: Any) -> torch.dtype:
    """Return the type in which the gradient of a parameter is added up."""
    found: torch.dtype = parameter.grad_dtype or parameter.dtype
    return found


def compute_wide_factor(parameters: Iterable[Any]) -> float:
    """Return the bytes that wide gradients take beyond narrow ones, for each byte of the parameters that learn."""
    sizes = {True: 0, False: 0}
    for parameter in parameters:
        if parameter.requires_grad:
            sizes[parameter.dtype is torch.bfloat16] += parameter.numel() * parameter.element_size()
    return sizes[True] / (sum(sizes.values()) or 1)
