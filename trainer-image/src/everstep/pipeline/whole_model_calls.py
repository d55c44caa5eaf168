"""Refuse functions that compute over all parameters together, where a process has some of them only.

`torch.nn.utils.clip_grad_norm_` would clip each process by another factor, `torch.amp.GradScaler` skip other steps on
each, and an optimizer such as LBFGS go another way. Nothing in their results says so.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.errors import PipelineError

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_group = clip_grad._group_tensors_by_device_and_dtype
_NORMS = ("_get_total_norm", "_clip_grads_with_norm_")  # which group gradients, as other functions of torch do too
_unscale = torch.amp.GradScaler._unscale_grads_
_handles: list[Any] = []
_TOGETHER = (torch.optim.LBFGS,)
# Of optimizers of other libraries: what is in their groups of parameters, or in those that they hand on.
_SIGNS = (
    ({"d", "d0"}, "estimates its step from all parameters together, as Prodigy and D-Adaptation do"),
    ({"rho", "adaptive"}, "goes along the gradient of all parameters together, as SAM does"),
    ({"max_grad_norm"}, "clips by the norm of all gradients together, as LAMB of some libraries does"),
)


def refuse_whole_model_calls(engine: Engine) -> None:
    """Refuse such functions on the parameters of an engine, until `allow_whole_model_calls`."""
    _engines.add(engine)
    if not _handles:
        # By what it calls: scripts may have imported the function itself long before.
        clip_grad._group_tensors_by_device_and_dtype = _group_unless_in_parts
        torch.amp.GradScaler._unscale_grads_ = _unscale_unless_in_parts
        _handles.append(register_optimizer_step_pre_hook(_look_at_optimizer))


def allow_whole_model_calls(engine: Engine) -> None:
    """Allow them again, when the engine is closed."""
    _engines.discard(engine)
    if not _engines and _handles:
        _handles.pop().remove()
        clip_grad._group_tensors_by_device_and_dtype = _group
        torch.amp.GradScaler._unscale_grads_ = _unscale


def _group_unless_in_parts(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if sys._getframe(1).f_code.co_name in _NORMS and _are_gradients_in_parts(tensors[0]):
        raise PipelineError(
            "clip_grad_norm_, get_total_norm or clip_grads_with_norm_ of torch.nn.utils was called with gradients of a "
            "pipeline, of which this process has only its part, so that each process would have another norm: call "
            "run.clip_grad_norm_(max_norm) on all processes, which returns the norm of all gradients and with inf "
            "changes none, or give EngineOptions(clip=max_norm)"
        )
    return _group(tensors, *args, **kwargs)


def _unscale_unless_in_parts(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if _are_in_parts(_list_parameters(optimizer)):
        raise PipelineError(
            "torch.amp.GradScaler was called with an optimizer of a pipeline, and would look for overflows in the "
            "gradients of this process only, so that each process would skip other steps: give "
            "EngineOptions(precision='fp16'), which scales the loss and skips a step on all processes, and leave the "
            "GradScaler out, or make it with enabled=False"
        )
    return _unscale(scaler, optimizer, *args, **kwargs)


def _look_at_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    if any(engine.is_adding_up(_list_parameters(optimizer)) for engine in _engines):
        raise PipelineError(
            f"{type(optimizer).__name__} was to step between the batches of one step of a pipeline, when gradients are "
            "sums that are neither scaled nor summed over replicas: call optimizer.step() after run.step(…, last=True) "
            "only, and end a step so with the last batch of an epoch too"
        )
    why = _explain_togetherness(optimizer)
    if why and _are_in_parts(_list_parameters(optimizer)):
        raise PipelineError(
            f"{type(optimizer).__name__} {why}, and this process of a pipeline has only its part of them, so that the "
            "processes would diverge: use an optimizer that treats each parameter by itself, as SGD or AdamW, and clip "
            "with EngineOptions.clip or run.clip_grad_norm_"
        )


def _explain_togetherness(optimizer: Any) -> str:
    """Return why an optimizer would do something else with a part of the parameters; empty if nothing shows that."""
    if isinstance(optimizer, _TOGETHER):
        return "computes over all parameters together"
    for keys, why in _SIGNS:
        if any(keys <= group.keys() and group[min(keys - {"adaptive"})] for group in optimizer.param_groups):
            return why
    return ""


def _list_parameters(optimizer: Any) -> Iterable[Any]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _are_in_parts(parameters: Iterable[Any]) -> bool:
    """Tell whether gradients or parameters of the same model are on other processes."""
    known = {
        id(each)
        for engine in _engines
        if engine.transport.size > 1 or engine.parameters.reduction.keepers
        for each in engine.parameters.own
    }
    return bool(known) and any(id(each) in known for each in parameters)


def _are_gradients_in_parts(gradients: Iterable[Any]) -> bool:
    """Tell whether these are gradients of parameters of which others are on other processes."""
    given = set(map(id, gradients))
    own = (each for engine in _engines for each in engine.parameters.own if id(each.grad) in given)
    return bool(given) and _are_in_parts(own)
