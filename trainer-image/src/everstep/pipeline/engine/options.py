"""Define the options of a run, which are the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.pipeline.errors import PipelineError

PRECISIONS = ("full", "bf16", "fp16")


@dataclass(frozen=True)
class EngineOptions:
    """`seed`: of all random numbers. `precision`: of the computations under autocast, `full` for none; with `fp16` sums
    of losses are multiplied by a scale that begins at `loss_scale` and halves when a gradient overflows.

    `clip`: the largest norm of all gradients together. `recompute`: stages that keep their inputs only and do their
    forward again before their backward. `offload`: stages whose saved activations wait in the host's memory.
    `loss_weight(output, targets)`: what the mean that a loss gives stands for; by default its samples.
    `whole`: arguments that go to each micro-batch as they are. `dynamic`: values whose shape depends on more than those
    of the inputs, and is told each time. `ahead`: receives that are posted before their turn. `bucket`: bytes of
    gradients that are reduced at once. `fp32_gradients`: those of bfloat16 parameters are added up, reduced and scaled
    in float32, and rounded once, for twice their memory and traffic. `broadcast`: begin with the weights of the first
    replica, and of a shared parameter's first stage. `in_flight`: forwards of one stage that may be without their
    backward; None for any number.
    """

    seed: int = 0
    precision: str = "full"
    loss_scale: float = 4096.0
    clip: float | None = None
    recompute: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
    loss_weight: Callable[[Any, Any], Any] | None = None
    whole: frozenset[str] = frozenset()
    dynamic: frozenset[str] = frozenset()
    ahead: int = 2
    bucket: int = 25 * 2**20
    fp32_gradients: bool = False
    broadcast: bool = True
    in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise PipelineError(f"precision is one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        if self.clip is not None and not self.clip > 0:
            raise PipelineError(f"clip is a norm above 0, not {self.clip}")
        if self.ahead < 0 or self.bucket < 1:
            raise PipelineError("ahead must not be negative, bucket at least 1 byte")
