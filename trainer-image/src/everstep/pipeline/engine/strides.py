"""The layout of a tensor in memory, which its receiver keeps.

Whether `reshape`, `flatten` and `contiguous` copy follows from that, and so does what a change in place of their result
changes. Of a tensor with gaps, as a slice of another, the gaps are made small: what can be viewed in which way stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

Strides = tuple[int, ...]


def describe_strides(tensor: torch.Tensor) -> Strides | None:
    """Return the strides that a copy gets of a tensor on another process; None if it is contiguous, or is no plain
    block of memory."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    known = tensor.stride()
    dims = sorted((dim for dim, size in enumerate(tensor.shape) if size > 1 and known[dim]), key=known.__getitem__)
    found = [step if not step else 1 for step in known]
    if dims:
        found[dims[0]] = min(known[dims[0]], 2)
    for inner, outer in pairwise(dims):
        end, length = known[inner] * tensor.shape[inner], found[inner] * tensor.shape[inner]
        if known[outer] < known[inner] * (tensor.shape[inner] - 1) + 1:
            return None  # elements that are one in memory
        found[outer] = length if known[outer] == end else length + 1
    for dim, size in enumerate(tensor.shape):
        if size == 1 and known[dim]:  # reaches no number, but torch tells by it which dimension is the last in memory
            ends = [(known[inner] * tensor.shape[inner], found[inner] * tensor.shape[inner]) for inner in dims]
            found[dim] = max((each for each in ends if each[0] <= known[dim]), default=(0, 1))[1]
    return tuple(found)


def lay_out(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Return a tensor with the same numbers that lies in memory with these strides.

    Args:
        tensor: A contiguous one.
        strides: As of `describe_strides`; None leaves the tensor as it is.
    """
    if strides is None:
        return tensor
    base: Any = tensor
    for dim, step in enumerate(strides):
        if not step and tensor.shape[dim] > 1:
            base = base.narrow(dim, 0, 1)
    made = torch.empty_strided(base.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(base).expand(tensor.shape)


def lay_out_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient that lies in memory as its parameter does, as autograd makes it: a fused optimizer goes through
    both by the place of their numbers in memory, and finds others where one has its channels last.

    Args:
        gradient: A tensor of the parameter's shape.
        parameter: The parameter.
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter.detach(), dtype=gradient.dtype).copy_(gradient)
