"""Targets of which some samples count more than others, that come only after training has begun.

A loss that gives a bare mean is weighted by samples. Where it is a mean over words or pixels that count, this shows
only if samples differ in how many of theirs count, which the example may not. So the first batch in which they do, by
-100 or by a mask, has the loss looked at once more.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from everstep.pipeline.engine.losses import Loss, compute_loss
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.loss_state import loss_kept

_log = logging.getLogger("everstep.pipeline")

_IGNORED = -100  # by all losses of torch, unless they are told another number
_EVERY = 64  # batches; targets on a GPU are waited for
_ADVICE = (
    "give EngineOptions.loss_weight, a function of (output, targets) that returns how many count, or let the loss "
    "return (sum, count)"
)


class CountedTargets:
    """A loss that is looked at once more where samples differ in how much of their targets counts.

    Raises:
        PipelineError: It is a mean over what counts, and has no weight that says how much that is.
    """

    def __init__(self, loss: Loss, weight: Loss | None) -> None:
        self._loss, self._weight = loss, weight
        self._is_done, self._looks, self._batches = weight is not None, False, 0

    def see(self, targets: Any) -> None:
        """See the targets of a batch before its micro-batches are given to the loss."""
        if not self._is_done and not self._looks:
            self._batches += 1
            self._looks = any(map(self._is_uneven, tensors_of(targets)))

    def __call__(self, output: Any, targets: Any) -> Any:
        if self._looks:
            self._looks, self._is_done = False, True
            self._look(output, targets)
        given = self._loss(output, targets)
        if isinstance(given, tuple):
            self._is_done = True
        return given

    def _is_uneven(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype not in (torch.int64, torch.int32, torch.bool) or not tensor.dim() or len(tensor) < 2:
            return False
        if tensor.device.type != "cpu" and self._batches % _EVERY != 1:
            return False
        counts = _find_ignored(tensor).reshape(len(tensor), -1).sum(1)
        return bool((counts != counts[0]).any())

    def _look(self, output: Any, targets: Any) -> None:
        """Compare the loss of two samples, of one of which half is ignored, with the mean of the losses of each."""
        tensors = [*tensors_of(output), *tensors_of(targets)]
        if any(not each.dim() or len(each) != len(tensors[0]) for each in tensors):
            warnings.warn(
                "samples of this batch differ in how much of their targets counts, and the loss gives a bare mean, "
                f"which a pipeline weights by samples: if it is a mean over what counts, {_ADVICE}",
                stacklevel=2,
            )
            return
        devices = {each.device.index or 0 for each in tensors if each.device.type == "cuda"}
        for factor in (3.0, 1.0):  # losses are nearly alike before training; but not all outputs can be any number
            try:
                with torch.no_grad(), torch.random.fork_rng(sorted(devices)), loss_kept(self._loss):
                    at_once, apart = self._compute_both(output, targets, factor)
            except Exception as error:
                _log.info("whether the loss counts targets was not checked: %s: %s", type(error).__name__, error)
                continue
            if at_once != at_once:
                return
            if not abs(at_once - apart) <= 1e-4 * max(abs(at_once), abs(apart)):
                raise PipelineError(
                    f"the loss of two samples, of which one counts less, is {at_once:.6g} at once, and the mean of "
                    f"their losses is {apart:.6g}: it is a mean over what counts in the targets, of which samples of "
                    f"this batch have different numbers, and a pipeline weights a bare mean by samples: {_ADVICE}"
                )
            return

    def _compute_both(self, output: Any, targets: Any, factor: float) -> tuple[float, float]:
        tensors = [each for each in tensors_of(targets) if each.dtype in (torch.int64, torch.int32, torch.bool)]
        ignored = [_find_ignored(each).reshape(len(each), -1).sum(1).cpu() for each in tensors]
        fullest = int(torch.stack(ignored).sum(0).argmin())

        def twice(tensor: torch.Tensor) -> torch.Tensor:
            own = tensor.detach()[fullest : fullest + 1]
            return torch.cat([own, own]).clone()

        outputs, wanted = map_tensors(output, twice), map_tensors(targets, twice)
        for each in tensors_of(outputs):
            if each.is_floating_point():
                each[0] *= factor
        for each in tensors_of(wanted):
            if each.dtype in (torch.int64, torch.int32):
                _ignore_half(each[0], _IGNORED)
            elif each.dtype is torch.bool:
                _ignore_half(each[0], False)

        def mean(rows: slice) -> float:
            torch.manual_seed(0)
            own = [map_tensors(each, lambda tensor: tensor[rows].clone()) for each in (outputs, wanted)]
            return float(compute_loss(self._loss, own[0], own[1], 1, None).sum)

        return mean(slice(0, 2)), (mean(slice(0, 1)) + mean(slice(1, 2))) / 2


def _find_ignored(tensor: torch.Tensor) -> torch.Tensor:
    return ~tensor if tensor.dtype is torch.bool else tensor == _IGNORED


def _ignore_half(row: torch.Tensor, value: Any) -> None:
    """Let the first half of what counts in a row count no more, and all of it if that is one."""
    flat = row.view(-1)
    counting = (~_find_ignored(flat)).nonzero().flatten()
    flat[counting[: (len(counting) + 1) // 2]] = value
