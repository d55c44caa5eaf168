"""The order in memory of the axes of an optimizer's tensors, where it is not the usual one.

A factor that torch.linalg.qr() gives lies by columns. The same numbers by rows are multiplied in another order, so that
a run that goes on with them rounds otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from everstep.checkpoint.format.manifest import StoredTensor
from everstep.checkpoint.state.kinds import make_fresh_tensor
from everstep.checkpoint.state.memory import WHOLE, overlaps_itself

AXES = "axes"  # of each parameter: axes of the tensors of its state, from the outermost to the innermost in memory


def find_axes(
    params: Sequence[torch.Tensor], leaves: Iterable[tuple[int, str, Any]]
) -> dict[int, dict[str, list[int]]]:
    """Return the axes of tensors that a restore would not make so by itself, by parameter and name.

    Args:
        params: The parameters of the optimizer.
        leaves: The place of a parameter, a name below it, and what its state has there.
    """
    found: dict[int, dict[str, list[int]]] = defaultdict(dict)
    for place, name, leaf in leaves:
        if type(leaf) in WHOLE and leaf.dim() > 1:
            param = params[place]
            is_like = type(param) in WHOLE and param.shape == leaf.shape
            if leaf.is_contiguous() and not (is_like and not param.is_contiguous()):
                continue
            axes = _order_axes(leaf)
            if axes != (_order_axes(param) if is_like else list(range(leaf.dim()))) and not overlaps_itself(leaf):
                found[place][name] = axes
    return found


def make_fresh(saved: StoredTensor, dtype: torch.dtype, axes: Sequence[int] = ()) -> torch.Tensor:
    """Return memory for a saved tensor: none yet where it may stay where it is read, as it can in its own type.

    Args:
        saved: The tensor.
        dtype: The type that it gets.
        axes: In the order in which they are to lie in memory, where that is not the usual one.
    """
    if axes and sorted(axes) == list(range(len(saved.shape))):
        laid = torch.empty([saved.shape[axis] for axis in axes], dtype=dtype, device="cpu")
        return laid.permute([axes.index(axis) for axis in range(len(axes))])
    if dtype is getattr(torch, saved.dtype):
        return make_fresh_tensor(saved)
    return torch.empty(saved.shape, dtype=dtype, device="cpu")


def _order_axes(tensor: torch.Tensor) -> list[int]:
    if tensor.is_contiguous():  # whatever the strides of axes of one element
        return list(range(tensor.dim()))
    strides: tuple[int, ...] = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
