"""Refuse code that does something else where gradients are off, and of which the stages have what it does with them.

A trace sees code with gradients. A module that is never cut runs its own `forward`, and asks for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.losses import Loss, compute_loss
from everstep.pipeline.engine.microbatch import Parts, batch_size
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.autocast import casting_to
from everstep.pipeline.frontend.check import as_before, run_stages
from everstep.pipeline.frontend.script_draws import ScriptDraws
from everstep.pipeline.frontend.stages import StageModule
from everstep.pipeline.frontend.trace import attributes_kept
from everstep.pipeline.repeatable_modes import evaluation_mode

_log = logging.getLogger("everstep.pipeline")
_TARGETS = "targets:"  # beside the arguments, of which none has such a name
_TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
}  # relative; fused kernels that need no gradients round otherwise
_OF_NARROW = 0.2


def check_gradient_mode(
    model: nn.Module,
    parts: Sequence[StageModule],
    batch: Mapping[str, Any],
    targets: Any,
    loss: Loss,
    weight: Loss | None,
    unsplit_inputs: Collection[str],
    autocast: torch.dtype | None = None,
) -> str:
    """Compare the loss of an evaluation by the stages with that by the model, both without gradients.

    Args:
        model: With its weights; nothing is compared where it has none here.
        parts: The stages, which compute the same with gradients.
        batch: Some samples, by the names of arguments.
        targets: Theirs.
        loss: As given to pipeline().
        weight: The same.
        unsplit_inputs: Arguments without samples.
        autocast: The type to which steps cast.

    Returns:
        Nothing: there is nothing to tell.

    Raises:
        PipelineError: They differ.
    """
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(batch)), *tensors_of(targets)]
    samples = None if isinstance(targets, Parts) else batch_size(dict(batch), frozenset(unsplit_inputs))
    if any(each.device.type == "meta" for each in tensors) or not samples or not Arguments(model).fits_by_name(batch):
        return ""
    device = tensors[0].device

    draws = ScriptDraws(model)
    drawn = draws.get_state()

    def compute(call: Any) -> Any:
        with as_before(model), attributes_kept(model), draws.at(drawn):
            own = map_tensors({**batch, _TARGETS: targets}, lambda tensor: tensor.to(device).clone())
            wanted = own.pop(_TARGETS)
            part = compute_loss(loss, call(own), wanted, samples, weight)
            return part.sum.double() / part.count

    try:
        # Stages have modules of their own kind around those of the model, with flags of their own.
        with (
            torch.no_grad(),
            casting_to(autocast, device.type),
            evaluation_mode(nn.ModuleList(p.module for p in parts)),
            evaluation_mode(model),
        ):
            one = float(compute(lambda given: Arguments(model).call(model, given)))
            again = float(compute(lambda given: Arguments(model).call(model, given)))
            other = float(compute(lambda given: run_stages(parts, given)))
    except PipelineError:
        raise
    except Exception as error:
        _log.info("an evaluation was not compared with the model: %s: %s", type(error).__name__, error)
        return ""
    types = [each.dtype for each in tensors if each.is_floating_point()] + ([] if autocast is None else [autocast])
    tolerance = max((_TOLERANCE.get(each, _OF_NARROW) for each in types), default=_OF_NARROW)
    if one == again and abs(one - other) > tolerance * max(abs(one), abs(other)):
        raise PipelineError(
            f"the loss of an evaluation is {one:.6g} by the model and {other:.6g} by its stages, though both are alike "
            "with gradients: forward does something else where they are off, as code that asks "
            "torch.is_grad_enabled() or x.requires_grad, and the stages have what it does with them: ask "
            "self.training, or move that code into a module that has no modules inside, which is never cut; "
            "PlanOptions(check=False) trains it as it is"
        )
    return ""
