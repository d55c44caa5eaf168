"""Low-precision copies of the weights under autocast: one for all micro-batches of a batch.

Autocast keeps the copy of a weight until its outermost scope ends. Each forward of a stage is a scope of its own, since
backwards must not be inside one: so each micro-batch in flight would keep copies of its own for its backward. What is
done here is what the outermost scope does at its ends, without turning autocast on in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import cache

import torch


@contextlib.contextmanager
def share_casts(*, is_wanted: bool) -> Iterator[None]:
    """Keep the copies that autocast makes inside, in this thread, until the end; the weights must not change meanwhile.

    Args:
        is_wanted: Whether anything is computed under autocast; else nothing is done.
    """
    if not is_wanted or not _learn_after_no_grad():
        yield
        return
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def forget_casts_of_script() -> None:
    """Forget the copies of a scope that the script has entered for all of its steps: they are of earlier weights.

    Not without such a scope: threads share the copies, and others may be in the middle of a step.
    """
    is_within = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    if is_within:
        torch.clear_autocast_cache()


def forget_stale_casts(weights: Iterable[torch.Tensor], known: int | None) -> int:
    """Forget the copies of this thread's scope if a weight was written since they were made.

    A module may do so in its forward, as an embedding with `max_norm` does. Micro-batches in flight keep theirs.

    Args:
        weights: All that there may be copies of.
        known: What the last call returned; None if a weight is known to be written in each forward.

    Returns:
        A number that changes with each write; writes through `.data` are not counted by torch.
    """
    versions = sum(int(weight._version) for weight in weights)
    if versions != known:
        torch.clear_autocast_cache()
    return versions


@cache
def _learn_after_no_grad() -> bool:
    """Tell whether a copy that was made without gradients is not reused where gradients are wanted.

    Some versions of torch reuse it, and a recomputation, whose first forward has no gradients, would then learn
    nothing.
    """
    weight, given = torch.ones(1, 1, device="cpu", requires_grad=True), torch.ones(1, 1, device="cpu")
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            torch.mm(given, weight)
        return bool(torch.mm(given, weight).requires_grad)
