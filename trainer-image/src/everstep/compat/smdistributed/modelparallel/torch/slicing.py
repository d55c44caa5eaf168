"""The arguments of a step function, cut into micro-batches."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import torch


def slice_argument(value: Any, count: int, index: int, axis: int, name: str) -> Any:
    """Return micro-batch `index` of `count`.

    Tensors are cut along `axis`, lists, tuples, mappings and sets by what is in them, objects by their smp_slice;
    anything else goes to every micro-batch.

    Args:
        value: The argument of the step function.
        count: Number of micro-batches.
        index: The micro-batch to return.
        axis: The axis along which tensors are cut.
        name: Name of the argument, for messages.

    Raises:
        ValueError: A tensor does not divide.
    """
    if isinstance(value, torch.Tensor):
        if not value.dim():
            return value
        size = value.shape[axis]
        if size % count:
            raise ValueError(
                f"argument {name!r}: a batch of {size} is not divisible by microbatches, {count}: drop the last batch, "
                "or name the argument in non_split_inputs"
            )
        return value.narrow(axis, index * (size // count), size // count)
    if hasattr(value, "smp_slice"):
        return value.smp_slice(count, index, axis)
    if isinstance(value, MutableMapping):
        made = copy.copy(value)  # of a type that may be made from who knows what
        for key, each in value.items():
            made[key] = slice_argument(each, count, index, axis, name)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(slice_argument(each, count, index, axis, name) for each in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(slice_argument(each, count, index, axis, name) for each in value)
    return value
