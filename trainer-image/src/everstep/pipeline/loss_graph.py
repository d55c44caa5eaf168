"""Refuse a loss that differentiates what a model returns through the model, as a penalty on gradients does.

The last stage has the graph of its own part only: `torch.autograd.grad(output, hidden, allow_unused=True)` would give
nothing, or a part, of what it gives in one process, and nobody would be told.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.losses import Loss, compute_loss
from everstep.pipeline.engine.microbatch import Parts, batch_size
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.check import as_before
from everstep.pipeline.frontend.script_draws import ScriptDraws
from everstep.pipeline.frontend.trace import attributes_kept

_log = logging.getLogger("everstep.pipeline")

_SAMPLES = 2
_UNUSED = "not have been used in the graph"  # says torch of what it cannot differentiate by
_ROUNDING = 1e-6  # relative: both losses are of the same numbers


def check_loss_graph(
    model: nn.Module,
    inputs: Mapping[str, Any],
    targets: Any,
    loss: Loss,
    weight: Loss | None,
    unsplit_inputs: Collection[str],
) -> str:
    """Compute the loss of an output with the graph of the whole model, and without the model's.

    Args:
        model: With its weights; nothing is computed where it has none here.
        inputs: The example by the names of arguments.
        targets: The example's.
        loss: As given to pipeline().
        weight: The same.
        unsplit_inputs: Arguments without samples.

    Returns:
        Nothing: there is nothing to tell.

    Raises:
        PipelineError: The loss is another one.
    """
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(inputs)), *tensors_of(targets)]
    samples = None if isinstance(targets, Parts) else batch_size(dict(inputs), frozenset(unsplit_inputs))
    if any(each.device.type == "meta" for each in tensors) or not samples:
        return ""
    device, count = tensors[0].device, min(samples, _SAMPLES)

    def take(given: Any, number: int) -> Any:
        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor[:number] if tensor.dim() and len(tensor) == samples else tensor).to(device, copy=True)

        return map_tensors(given, rows)

    def separate(tensor: torch.Tensor) -> torch.Tensor:
        alone = tensor.detach().requires_grad_() if tensor.requires_grad else tensor
        return alone.clone()  # no leaf: a loss may change in place what it is given

    draws = ScriptDraws(loss if isinstance(loss, nn.Module) else model)
    drawn = draws.get_state()

    def compute(output: Any) -> float:
        torch.manual_seed(0)
        with draws.at(drawn):
            return float(compute_loss(loss, output, take(targets, count), count, weight).sum.detach())

    try:
        with as_before(model), attributes_kept(model), torch.enable_grad():
            given = {name: take(each, samples if name in unsplit_inputs else count) for name, each in inputs.items()}
            output = Arguments(model).call(model, given)
            separated, without, apart, again = [map_tensors(output, separate) for _ in range(2)], "", 0.0, 0.0
            try:
                apart, again = map(compute, separated)
            except RuntimeError as error:
                if _UNUSED not in str(error):
                    raise
                without = "no gradient"
            whole = compute(output)  # last, as a loss may change it
    except PipelineError:
        raise
    except Exception as error:  # what fails without the model's graph fails in a stage, too, and says so
        _log.info("whether the loss differentiates the model was not checked: %s: %s", type(error).__name__, error)
        return ""
    if without or (apart == again and abs(whole - apart) > _ROUNDING * max(abs(whole), abs(apart))):
        raise PipelineError(
            f"the loss of one output is {whole:.6g} with the graph of the model, and {without or f'{apart:.6g}'} "
            "without: it differentiates what the model returns (torch.autograd.grad), as a penalty on gradients does, "
            "and the last stage has a part of that graph only; leave the penalty out, or train the model in one "
            "process; PlanOptions(check=False) trains it as it is"
        )
    return ""
