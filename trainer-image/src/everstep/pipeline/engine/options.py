"""Define the options of a run, which are the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from everstep.pipeline.errors import PipelineError

PRECISIONS = ("full", "bf16", "fp16")


@dataclass(frozen=True)
class EngineOptions:
    """The options of how a pipeline runs: precision, random numbers, gradients, memory, and how long it waits.

    Attributes:
        seed: The seed of all random numbers.
        precision: The type of the computations under autocast: `bf16`, `fp16`, or `full` for no autocast.
        loss_scale: The number by which sums of losses are multiplied at first with `fp16`; it halves when a gradient
            overflows.
        clip: The largest norm of all gradients together; None for any.
        recompute: Whether stages keep their inputs only, and do their forward again before their backward: True for
            all, or the numbers of some.
        offload: The stages whose saved activations wait in the host's memory.
        loss_weight: A function of (output, targets) that says what the mean that a loss gives stands for; None for the
            number of samples.
        unsplit_inputs: The arguments that go to each micro-batch as they are.
        dynamic: The values whose shape depends on more than those of the inputs, and is sent with each, beside those of
            which the trace of the model shows it.
        ahead: The number of receives that are posted before their turn.
        bucket: The bytes of gradients that are reduced at once.
        fp32_gradients: Whether gradients of bfloat16 parameters are added up, reduced and scaled in float32, and
            rounded once, for twice their memory and traffic.
        broadcast: Whether all begin with the weights of the first replica, and of a shared parameter's first stage.
        in_flight: The number of forwards of one stage that may be without their backward; None for any.
        heartbeat: The seconds of silence after which a process is lost; None without heartbeats.
        timeout: The seconds that a process waits for the others before there are heartbeats, and for a message.

    Raises:
        PipelineError: A value cannot be.
    """

    seed: int = 0
    precision: str = "full"
    loss_scale: float = 4096.0
    clip: float | None = None
    recompute: bool | Collection[int] = False
    offload: frozenset[int] = frozenset()
    loss_weight: Callable[[Any, Any], Any] | None = None
    unsplit_inputs: frozenset[str] = frozenset()
    dynamic: frozenset[str] = frozenset()
    ahead: int = 2
    bucket: int = 25 * 2**20
    fp32_gradients: bool = False
    broadcast: bool = True
    in_flight: int | None = None
    heartbeat: float | None = 60.0
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise PipelineError(f"precision is one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        if self.clip is not None and not self.clip > 0:
            raise PipelineError(f"clip is a norm above 0, not {self.clip}")
        if self.ahead < 0 or self.bucket < 1:
            raise PipelineError(f"ahead is 0 or more, not {self.ahead}, and bucket at least 1 byte, not {self.bucket}")
        for name in ("heartbeat", "timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise PipelineError(f"{name} is a time in seconds above 0, not {seconds}")
        for name in ("unsplit_inputs", "dynamic"):
            if isinstance(given := getattr(self, name), str):
                raise PipelineError(f"{name} is a set of names, not the text {given!r}: give {{{given!r}}}")

    def recomputes(self, stage: int) -> bool:
        """Tell whether a stage does its forward again before its backward."""
        return self.recompute if isinstance(self.recompute, bool) else stage in self.recompute

    def describe(self) -> dict[str, Any]:
        """Return what all processes must say alike, by the names of the fields; each may wait as long as it wants."""
        return {name: value for name, value in vars(self).items() if name not in ("heartbeat", "timeout")}
