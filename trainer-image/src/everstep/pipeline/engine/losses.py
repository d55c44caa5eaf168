"""Losses as sums and counts, so that micro-batches of any size add up to what one process computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch

from everstep.pipeline.engine.result_uses import ResultUses
from everstep.pipeline.errors import PipelineError

Loss = Callable[[Any, Any], Any]


@dataclass
class LossPart:
    """The loss of one micro-batch: a sum with its graph, how much it counts, sums of other things."""

    sum: Any
    count: Any
    metrics: Mapping[str, Any]


@dataclass
class Total:
    """The sums over micro-batches, without graphs; they stay on the device until `values` is asked for."""

    sum: Any = 0.0
    count: Any = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    differentiated: int = 0  # how many of them had a graph
    drew: bool = False  # whether an evaluation has drawn random numbers
    results: ResultUses = field(default_factory=ResultUses)

    def add(self, part: LossPart) -> None:
        self.sum = self.sum + part.sum.detach().double()
        self.count = self.count + part.count
        for name, value in part.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value


def compute_loss(loss: Loss, output: Any, targets: Any, samples: int, weight: Loss | None) -> LossPart:
    """Return the loss of a micro-batch of `samples`, as a sum and how much it counts.

    `loss` gives (sum, count), (sum, count, metrics), or a mean, which is then weighted by `weight(output, targets)` or
    else by the samples. The mean of a micro-batch in which nothing counts is 0 / 0: its sum is 0, and has no graph.
    With `weight`, a count on a GPU is waited for.

    Raises:
        PipelineError: If the loss gives none of them, or a count of which there would be a gradient.
    """
    given = loss(output, targets)
    metrics: Mapping[str, Any] = {}
    if isinstance(given, tuple) and len(given) in (2, 3):
        total, count, *more = given
        metrics = more[0] if more else {}
        if weight is not None:
            raise PipelineError(
                "EngineOptions.loss_weight is for a loss that gives a mean; this one gives (sum, count)"
            )
    else:
        total, count = given, samples if weight is None else weight(output, targets)
    if not isinstance(total, torch.Tensor) or total.dim():
        raise PipelineError(
            f"a loss gives a scalar mean, or (sum, count) with a scalar sum; this one gave {_describe(total)}"
        )
    if not _is_number(count) or not isinstance(metrics, Mapping) or not all(map(_is_number, metrics.values())):
        raise PipelineError(
            "a loss that gives a tuple gives (sum, count), or (sum, count, metrics) with a dictionary of numbers; this "
            f"one gave ({', '.join(_describe(each) for each in given)}): give a mean alone, and what else you want to "
            "know as metrics"
            if isinstance(given, tuple)
            else f"EngineOptions.loss_weight gives a number, and here it gave {_describe(count)}"
        )
    if isinstance(count, torch.Tensor) and count.requires_grad:
        raise PipelineError(
            f"{'the count that a loss gives' if weight is None else 'what EngineOptions.loss_weight gives'} depends on "
            "what learns, and a pipeline divides by the count of all micro-batches, which has no gradient: detach() "
            "it, or let the model normalise its weights within each sample, and give a mean over samples"
        )
    if not isinstance(given, tuple):
        # A factor of 0 would not do: 0 times a gradient that is not a number is none either.
        total = torch.zeros_like(total) if weight is not None and not count else total * count
    return LossPart(total, _to_plain_number(count), {name: _to_plain_number(value) for name, value in metrics.items()})


def _is_number(value: Any) -> bool:
    return not value.dim() if isinstance(value, torch.Tensor) else isinstance(value, Number)


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _to_plain_number(number: Any) -> Any:
    return number.detach().double() if isinstance(number, torch.Tensor) else number
