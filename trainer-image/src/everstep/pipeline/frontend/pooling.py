"""Pooling over windows that follow from sizes, as over a whole image or text: torch takes those for numbers, and its
result, and what it is given, would have the example's sizes from then on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from everstep.pipeline.frontend.stand_ins import make_like, make_number

_POOLING = re.compile(r"(max|avg|lp)_pool([123])d(_with_indices)?")
_MAX = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVG = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_ARGUMENTS = {"max": _MAX, "avg": _AVG, "lp": ("norm_type", "kernel_size", "stride", "ceil_mode")}


def is_pooling(name: str) -> bool:
    """Tell whether an operation takes the largest, or the average, of each window.

    Args:
        name: The operation's.
    """
    return _POOLING.fullmatch(name) is not None


def run_pooling(name: str, func: Callable[..., Any], given: Any) -> Any:
    """Run such an operation on tensors without data, whose sizes may be symbols.

    Args:
        name: The operation's.
        func: The operation.
        given: Its arguments and its named arguments.

    Returns:
        Its result, with sizes that follow from those that it was given.
    """
    args, kwargs = given
    found = _POOLING.fullmatch(name)
    assert found is not None
    names = _ARGUMENTS[found[1]]
    options = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    image = args[0] if args else options.get("input")
    # With ceil_mode, torch would assume that the last window begins where it does in the example.
    if isinstance(image, torch.Tensor) and (options.get("ceil_mode") or _have_sizes(options)):
        return _run_with_sizes(func, given, int(found[2]), image, options)
    if name == "max_pool1d":  # which computes with numbers, unless it makes indices
        return nn.functional.max_pool1d_with_indices(*args, **kwargs)[0]
    return func(*args, **kwargs)


def _have_sizes(values: Any) -> bool:
    leaves = pytree.tree_leaves(values)
    return any(isinstance(leaf, torch.SymInt) and leaf.node.expr.free_symbols for leaf in leaves)


def _run_with_sizes(func: Callable[..., Any], given: Any, dims: int, image: Any, options: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map(lambda leaf: make_number(leaf, {}), given)
    result = func(*args, **kwargs)  # which says what is wrong
    windows = _repeat(options["kernel_size"], dims)
    steps = _repeat(options.get("stride") or windows, dims)
    pads, spreads = _repeat(options.get("padding", 0), dims), _repeat(options.get("dilation", 1), dims)
    first, sizes = image.dim() - dims, []
    for size, window, step, pad, spread in zip(
        image.shape[image.dim() - dims :], windows, steps, pads, spreads, strict=True
    ):
        room = size + 2 * pad - spread * (window - 1) - 1
        if options.get("ceil_mode"):  # a window that begins behind the image and its first padding is none
            sizes.append(torch.sym_min(-(-room // step) + 1, -(-(size + pad) // step)))
        else:
            sizes.append(room // step + 1)
    shape = [*image.shape[:first], *sizes]
    return pytree.tree_map(lambda leaf: make_like(leaf, shape) if isinstance(leaf, torch.Tensor) else leaf, result)


def _repeat(value: Any, dims: int) -> Sequence[Any]:
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * dims if len(values) == 1 else values
