"""Process all gradients once a step: scale them by the global count, clip them, and check them for overflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.pipeline.engine.agreement import Disagreement
from everstep.pipeline.engine.clipping import scale_gradients, sum_of_powers
from everstep.pipeline.engine.losses import Total
from everstep.pipeline.engine.metrics import digest_names

_GROWS_AFTER = 2000  # steps without overflow
_SUMS = 9  # over all ranks, beside the uses of results


@dataclass
class LossScale:
    """The factor by which losses are multiplied under fp16, so that small gradients do not vanish; otherwise fixed at
    1."""

    value: float = 1.0
    moves: bool = False
    good: int = 0

    def update(self, overflow: bool) -> None:
        """Adapt the factor after a step, if it moves: halve it after an overflow, and double it after enough steps
        without."""
        if not self.moves:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value /= 2
        elif self.good == _GROWS_AFTER:
            self.value, self.good = self.value * 2, 0


@dataclass(frozen=True)
class Scaled:
    """The result over all micro-batches, ranks and replicas.

    `norm` is that of the gradients before clipping, None if it was not asked for; `metrics` are the sum of the digests
    of the names of what the loss gives beside it, and that of their squares; `drew` says whether an evaluation drew
    random numbers on any rank.
    """

    loss: float
    count: float
    norm: float | None
    skipped: bool
    metrics: tuple[float, float] = (0.0, 0.0)
    drew: bool = False


def scale_to_mean_loss(
    parameters: Sequence[Any],
    counted: Sequence[Any],
    total: Total,
    reduce: Callable[[Any], None],
    scaling: LossScale,
    clip: float | None,
    device: torch.device,
    hooks: Callable[[], None] | None = None,
    narrow: Callable[[], None] = lambda: None,
) -> Scaled:
    """Make sums of gradients those of the mean loss. Of `parameters`, this rank's, those in `counted` are in the norm
    for all; `reduce` sums a tensor in place over all ranks and replicas.

    A step without anything that counts, and under fp16 one with an overflow, leaves no gradients: an optimizer that is
    called then changes nothing. So it is for parameters behind results that no loss has used. `hooks` change gradients
    of the mean loss, before they are clipped; on all ranks gradients get the types that hooks expect by `narrow`, if
    there are hooks on any. Disagreement on all ranks if nothing was differentiated, and there are parameters that
    learn.
    """
    asked = clip is not None or scaling.moves
    uses = total.results.take()
    sums = torch.tensor([0.0] * _SUMS + uses, dtype=torch.float64, device=device)
    sums[0], sums[1] = total.sum, total.count
    if asked:
        sums[2] = sum_of_powers(counted)
    sums[5] = float(hooks is not None)
    sums[3] = digest_names(total.metrics)
    sums[4] = sums[3].square()
    sums[6], sums[7] = total.differentiated, float(any(each.requires_grad for each in parameters))
    sums[8] = float(total.drew)
    reduce(sums)
    reduced: list[float] = sums.tolist()
    loss, count, squares, *digests, hooked, differentiated, learning, drew = reduced[:_SUMS]
    metrics = digests[0], digests[1]
    total.results.drop_zeros(reduced[_SUMS:])
    if count and learning and not differentiated:
        raise Disagreement(
            f"no loss of the step depends on anything that learns, so there is nothing to differentiate (its mean is "
            f"{loss / count:.6g}), as where it was made of numbers (item()), arrays or detached tensors; one process's "
            "loss.backward() is an error too: compute the loss with tensors from what the model returns"
        )
    overflow = scaling.moves and not math.isfinite(squares)
    factor = 1.0 / (count * scaling.value) if count else 0.0
    if hooked and count and not overflow:
        scale_gradients(parameters, factor)
        narrow()
        if hooks is not None:
            hooks()
        factor = 1.0
        if asked:  # by all ranks, since there are hooks on some
            again = sums.new_zeros(1)
            again[0] = sum_of_powers(counted)
            reduce(again)
            squares = again.item()
            overflow = scaling.moves and not math.isfinite(squares)
    if not count or overflow:
        for parameter in parameters:
            parameter.grad = None
        scaling.update(overflow)
        return Scaled(loss / count if count else math.nan, count, None, True, metrics, bool(drew))
    norm = math.sqrt(squares) * factor if asked else None
    if clip is not None and norm is not None:
        factor *= min(1.0, clip / (norm + 1e-6))
    scale_gradients(parameters, factor)
    scaling.update(False)
    return Scaled(loss / count, count, norm, False, metrics, bool(drew))
