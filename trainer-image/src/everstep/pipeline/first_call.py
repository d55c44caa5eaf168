"""A model is called once before it is traced: code that keeps tables beside its modules makes them with data.

A trace runs a model on tensors without data. What modules keep of that is undone; what functions keep
(functools.cache), or dictionaries of a class or a file, is not: it would be without data ever after.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from everstep.pipeline.engine.losses import Loss
from everstep.pipeline.engine.microbatch import batch_size
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.autocast import casting_to
from everstep.pipeline.frontend.check import as_before
from everstep.pipeline.frontend.script_draws import ScriptDraws
from everstep.pipeline.frontend.trace import attributes_kept
from everstep.pipeline.loss_state import loss_kept

_log = logging.getLogger("everstep.pipeline")
_SAMPLES = 2


def count_least_samples(
    model: nn.Module,
    inputs: Mapping[str, Any],
    unsplit_inputs: Collection[str],
    autocast: torch.dtype | None,
    loss: Loss | None = None,
    targets: Any = None,
) -> int:
    """Return how many samples a micro-batch has to have: two where batch normalisation in training gets one value of
    each sample for a channel, since one value cannot be normalised, and where the loss takes two samples and not one,
    as behind a `squeeze()`, which drops the dimension of one sample.

    Args:
        model: The model; nothing is known of it where it has no weights here.
        inputs: The example by the names of arguments.
        unsplit_inputs: The arguments without samples.
        autocast: The type to which steps cast.
        loss: As given to pipeline().
        targets: The example's, if they are known; the loss is not called without.
    """
    layers = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.training]
    least: list[int] = []

    def look(layer: Any, given: Any) -> None:
        if given and given[0].numel() <= _SAMPLES * layer.num_features:
            least.append(2)

    hooks = [each.register_forward_pre_hook(look) for each in layers]
    try:
        if layers:
            call_once(model, inputs, unsplit_inputs, autocast)
    finally:
        for hook in hooks:
            hook.remove()
    if not least and loss is not None and targets is not None:
        takes = partial(_takes_samples, model, inputs, unsplit_inputs, autocast, loss, targets)
        if not takes(1) and takes(_SAMPLES):
            return 2
    return max(least, default=1)


def _takes_samples(
    model: nn.Module,
    inputs: Mapping[str, Any],
    unsplit_inputs: Collection[str],
    autocast: torch.dtype | None,
    loss: Loss,
    targets: Any,
    count: int,
) -> bool:
    """Tell whether the loss of so many samples can be computed."""
    outputs: list[Any] = []
    hook = model.register_forward_hook(lambda module, given, output: outputs.append(output))
    try:
        call_once(model, inputs, unsplit_inputs, autocast, count)
    finally:
        hook.remove()
    samples, draws = batch_size(dict(inputs), frozenset(unsplit_inputs)), ScriptDraws(model)
    device = next((each.device for each in tensors_of(outputs)), torch.device("cpu"))

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor[:count] if tensor.dim() and len(tensor) == samples else tensor).to(device, copy=True)

    try:
        with (
            as_before(model),
            loss_kept(loss),
            draws.at(draws.get_state()),
            torch.no_grad(),
            casting_to(autocast, device.type),
        ):
            loss(outputs[0], map_tensors(targets, take))
    except Exception as error:
        _log.info("the loss of %d samples cannot be computed: %s: %s", count, type(error).__name__, error)
        return False
    return True


def call_once(
    model: nn.Module,
    inputs: Mapping[str, Any],
    unsplit_inputs: Collection[str],
    autocast: torch.dtype | None,
    count: int = _SAMPLES,
) -> None:
    """Call a model in training and in evaluation, on some samples; nothing of it is another afterwards.

    Args:
        model: The model; it is not called where it has no weights here.
        inputs: The example by the names of arguments.
        unsplit_inputs: The arguments without samples.
        autocast: The type to which steps cast.
        count: The number of samples.
    """
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(inputs))]
    samples = batch_size(dict(inputs), frozenset(unsplit_inputs))
    if any(each.device.type == "meta" for each in tensors) or not samples or not Arguments(model).fits(inputs):
        return
    device, draws = tensors[0].device, ScriptDraws(model)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, copy=True)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return copy(tensor[:count] if tensor.dim() and len(tensor) == samples else tensor)

    flags = {each: each.training for each in model.modules()}
    try:
        with as_before(model), attributes_kept(model), draws.at(draws.get_state()), torch.no_grad():
            for mode in (model.training, not model.training):
                if mode != model.training:
                    for each in flags:  # not by `train`: one of a model's own may do more
                        each.training = mode
                with casting_to(autocast, device.type):
                    given = {
                        name: map_tensors(each, copy if name in unsplit_inputs else take)
                        for name, each in inputs.items()
                    }
                    Arguments(model).call(model, given)
    except Exception as error:
        _log.info("the model was not called before it was traced: %s: %s", type(error).__name__, error)
    finally:
        for each, flag in flags.items():
            each.training = flag
