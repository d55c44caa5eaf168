"""The result of a step, or of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepResult:
    """The result of one step, or of one evaluation.

    Attributes:
        loss: The mean over `count`, the same on all ranks.
        count: All that counts on all micro-batches and replicas.
        metrics: Sums that the loss gave, over the same count, on ranks of the last stage only.
        norm: The norm of all gradients before clipping, if clipping or fp16 was asked for.
        skipped: Whether there are no gradients, so that the step changes nothing.
        outputs: After an evaluation, what the model returned for each micro-batch, on ranks of the last stage only.
    """

    loss: float
    count: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    norm: float | None = None
    skipped: bool = False
    outputs: tuple[Any, ...] = ()
