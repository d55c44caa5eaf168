"""Float16 without a loss scale: gradients of a pipeline are sums until a step ends, and above 65,504 they are infinite.

One process takes the gradients of a mean. Here those of each micro-batch are of a sum of losses, and so larger by the
number of words or samples. With `precision="fp16"` parameters are wider, losses scaled, and steps with an overflow left
out. bfloat16 reaches as far as float32.
"""

from __future__ import annotations

import torch
from torch import nn

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.record import Call, ForwardRecord, Op

_ADVICE = "keep parameters in float32 and give EngineOptions(precision='fp16') or 'bf16', or cast the model to bfloat16"


def refuse_half_parameters(model: nn.Module, precision: str) -> None:
    """Check the types of a model's parameters.

    Raises:
        PipelineError: If one that learns is of float16, or any if the loss is not scaled.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.float16 and (parameter.requires_grad or precision != "fp16"):
            raise PipelineError(
                f"parameter {name!r} is of float16: its gradients, which are sums over samples and micro-batches, "
                f"would silently become infinite above 65504; {_ADVICE}"
                + ("" if parameter.requires_grad else "; with 'fp16', frozen parameters may be of float16")
            )


def refuse_half_regions(record: ForwardRecord, precision: str) -> None:
    """Check the types to which the model's own code casts.

    Raises:
        PipelineError: If it enters `torch.autocast` with float16, and the loss is not scaled.
    """
    items: list[Op | Call] = [*record.root.all_calls(), *record.root.ops()]
    for item in items:
        if precision != "fp16" and item.autocast is not None and item.autocast[1:] == (torch.float16, True):
            raise PipelineError(
                f"the model enters autocast with float16 itself (around {item.name!r}), where gradients silently "
                "become infinite, as no loss is scaled: give EngineOptions(precision='fp16'), or take "
                "bfloat16 there"
            )


def refuse_half_autocast(device: torch.device, precision: str) -> None:
    """Check what the script has around a step.

    Raises:
        PipelineError: If that is `torch.autocast` with float16, and the loss is not scaled.
    """
    kind = device.type
    if precision != "fp16" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
        raise PipelineError(
            "the step is inside torch.autocast with float16, where gradients silently become infinite, as no loss "
            "is scaled: leave that out, and give EngineOptions(precision='fp16') or 'bf16'"
        )
