"""A batch cut into micro-batches along its first dimension."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError


class Parts(tuple[dict[str, Any], ...]):
    """A batch that is cut already: what each micro-batch has of the model's arguments, by name. It counts as one sample
    for each micro-batch, and tensors in it may be of any shape."""


def select_arguments(batch: Any, names: Collection[str]) -> Any:
    """The same batch with these arguments only. KeyError if one is missing."""
    if isinstance(batch, Parts):
        return Parts({name: part[name] for name in sorted(names)} for part in batch)
    return {name: batch[name] for name in sorted(names)}


def batch_size(batch: Any, unsplit_inputs: frozenset[str] = frozenset(), *, are_targets: bool = False) -> int | None:
    """Samples of a batch, or of its targets: the first dimension of its tensors; None if it has none.

    Arguments named in `unsplit_inputs`, tensors without dimensions and other objects go whole to each micro-batch.
    PipelineError if tensors differ.
    """
    if isinstance(batch, Parts):
        return len(batch)
    sizes: dict[int, str] = {}
    for name, item in _name_tensors(batch):
        if name not in unsplit_inputs:
            for tensor in tensors_of(item):
                if tensor.dim():
                    sizes.setdefault(tensor.shape[0], name)
    if len(sizes) > 1:
        found = ", ".join(f"{name} {size}".strip() for size, name in sizes.items())
        if are_targets:
            raise PipelineError(
                f"the targets have tensors of different first dimensions ({found}): give the loss what has no samples "
                "itself, as by functools.partial(loss, weights=...)"
            )
        raise PipelineError(
            f"the batch has tensors of different first dimensions ({found}): name those that are not cut in "
            "EngineOptions.unsplit_inputs"
        )
    return next(iter(sizes), None)


def compute_bounds(size: int, microbatches: int, least: int = 1) -> list[tuple[int, int]]:
    """Return where each micro-batch begins and ends, as (start, stop) in samples.

    The micro-batches are as equal as can be, larger ones first, and none is empty, nor has fewer than `least` samples
    unless the batch has.
    """
    count = min(size // least, microbatches) or min(size, 1)
    each, more = divmod(size, count) if count else (0, 0)
    found, start = [], 0
    for index in range(count):
        stop = start + each + (index < more)
        found.append((start, stop))
        start = stop
    return found


def split_batch(
    batch: Any, size: int, microbatches: int, unsplit_inputs: frozenset[str] = frozenset(), least: int = 1
) -> list[Any]:
    """`batch` in at most `microbatches` parts, each with the batch's structure; views, nothing is copied.

    PipelineError for `Parts` that are not as many.
    """
    if isinstance(batch, Parts):
        if len(batch) != microbatches:
            raise PipelineError(
                f"the batch is already cut into {len(batch)} micro-batches, and the plan has {microbatches}"
            )
        return list(batch)
    return [_slice_batch(batch, size, where, unsplit_inputs) for where in compute_bounds(size, microbatches, least)]


def lend_targets(targets: Any, *, copied: bool) -> Any:
    """Return the targets of a micro-batch as a loss gets them, which may write them as in one process.

    They are views whose versions are their own: what autograd has saved of one stays valid when a loss writes those of
    another. What has no samples, and is that of all micro-batches, is a copy.

    Args:
        targets: A part of `split_batch`.
        copied: Whether all are copies, for a loss that is computed again from what it was given.

    Returns:
        The same structure.
    """

    def lend(tensor: Any) -> Any:
        if copied or not tensor.dim():
            return tensor.clone()
        return tensor if tensor.requires_grad else tensor.data

    return map_tensors(targets, lend)


def _slice_batch(batch: Any, size: int, where: tuple[int, int], unsplit_inputs: frozenset[str]) -> Any:
    def cut(tensor: Any) -> Any:
        return tensor[where[0] : where[1]] if tensor.dim() and tensor.shape[0] == size else tensor

    if isinstance(batch, dict) and unsplit_inputs:
        return {name: item if name in unsplit_inputs else map_tensors(item, cut) for name, item in batch.items()}
    return map_tensors(batch, cut)


def _name_tensors(batch: Any) -> list[tuple[str, Any]]:
    if isinstance(batch, dict):
        return [(str(name), item) for name, item in batch.items()]
    return [("", batch)]
