"""The norm of all gradients of a model whose parameters are on many ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from everstep.pipeline.engine.agreement import Disagreement


def sum_of_powers(parameters: Sequence[Any], norm_type: float = 2.0) -> Any:
    """Return the sum of all elements of the gradients to the power of `norm_type`, or for `inf` the largest one.

    Gradients of half the width are added up in float32: 65,504 is the largest float16, and bfloat16 has three digits.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [
        torch.linalg.vector_norm(each, norm_type, dtype=torch.float32 if each.element_size() < 4 else None)
        for each in gradients
        if each.element_size() < 4
    ]
    # As torch's get_total_norm, which a pipeline refuses for gradients of one process.
    by_type: dict[Any, list[Any]] = {}
    for each in gradients:
        if each.element_size() >= 4:
            by_type.setdefault(each.dtype, []).append(each)
    for wide in by_type.values():
        norms.append(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(wide, norm_type)), norm_type))
    if not norms:
        return 0.0
    every = torch.stack([each.double() for each in norms])
    return every.max() if norm_type == math.inf else (every**norm_type).sum()


def clip_gradients(
    parameters: Sequence[Any],
    counted: Sequence[Any],
    gather: Callable[[Any], Any],
    device: Any,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Any:
    """Multiply gradients so that the norm of those of all ranks is at most `max_norm`, as torch's `clip_grad_norm_`.

    Args:
        parameters: Those of this rank.
        counted: Those of them that this rank counts for all; together the ranks count each parameter once.
        gather: Makes of a vector the matrix with those of all ranks and replicas.
        device: Where what the ranks tell each other is.
        max_norm: The largest norm; `inf` changes nothing, and tells the norm.
        norm_type: 2 for the Euclidean norm, `inf` for the largest element, or any number above 0.
        error_if_nonfinite: Whether a norm that is `inf` or not a number is an error.

    Returns:
        The norm before, a scalar in float64; the same bits on all ranks.

    Raises:
        Disagreement: On all ranks, which may go on, if they ask for different norms, or for one that cannot be.
    """
    mine = torch.tensor([0.0, max_norm, norm_type], dtype=torch.float64, device=device)
    mine[0] = sum_of_powers(counted, norm_type) if norm_type > 0 else 0.0
    every = gather(mine)
    if not bool((every[:, 1:] == every[0, 1:]).all()):
        found = " and ".join(f"{row[0]:g} with norm_type={row[1]:g}" for row in every[:, 1:].unique(dim=0).tolist())
        raise Disagreement(f"the ranks do not agree on the norm of clip_grad_norm_: {found}; all must ask for the same")
    if not (max_norm >= 0 and norm_type > 0):
        raise Disagreement(
            f"clip_grad_norm_ takes a norm of 0 or more and a norm_type above 0, not {max_norm} and {norm_type}"
        )
    total = every[:, 0].max() if norm_type == math.inf else every[:, 0].sum() ** (1.0 / norm_type)
    if error_if_nonfinite and not math.isfinite(float(total)):
        raise Disagreement(f"the norm of the gradients is {float(total)}, so they cannot be clipped")
    factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
    scale_gradients(parameters, factor)
    return total


def scale_gradients(parameters: Sequence[Any], factor: float) -> None:
    """Multiply the gradients in place, unless that changes nothing."""
    for parameter in parameters if factor != 1.0 else ():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
