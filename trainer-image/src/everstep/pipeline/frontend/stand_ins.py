"""Tensors without data in the place of others: with numbers for their sizes, or with sizes that follow from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def make_number(leaf: Any, numbers: Mapping[Any, int]) -> Any:
    """Return an argument with numbers in the place of sizes.

    Args:
        leaf: A size, a tensor, or anything else, which stays as it is.
        numbers: The numbers of sizes, by their expressions; others are those of the example.

    Returns:
        The number of a size; a new tensor, without data if the other has none.
    """
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return numbers.get(leaf.node.expr, leaf.node.hint)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = [make_number(size, numbers) for size in leaf.shape]
    return torch.empty(shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)


def make_like(like: Any, shape: Sequence[Any]) -> Any:
    """Return a tensor without data of another shape, of which a gradient can be asked as of the other.

    Args:
        like: The other tensor.
        shape: Of numbers and sizes that follow from others.
    """
    made = like.new_empty(shape)
    return made.requires_grad_().clone() if like.requires_grad else made
