"""Hooks on parameters, which are called once a step with the gradient that one process would give them.

During a step the gradient of a parameter is a sum over micro-batches, over several stages if it is shared, and over
replicas, and divided by what counts only at the end. So hooks are taken off while that is added up, and called then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from everstep.pipeline.engine.strides import lay_out_gradient
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.gradients import has_hooks

Around = Callable[[str], contextlib.AbstractContextManager[None]]


def call_hooks(named: Mapping[str, Any], around: Around) -> None:
    """Call the hooks of the parameters that have a gradient, those of `register_hook` first, as autograd does.

    Args:
        named: Parameters by names that are the same wherever there is a copy of one.
        around: The context of the hooks of a name, in which copies draw the same random numbers.

    Raises:
        PipelineError: If a hook gives something that is no gradient of its parameter.
    """
    for name, parameter in named.items():
        if parameter.grad is None or not has_hooks(parameter):
            continue
        with around(name), torch.no_grad():
            for hook in list((parameter._backward_hooks or {}).values()):
                given = hook(parameter.grad)
                if given is not None:
                    parameter.grad = _check_hook_result(name, parameter, given)
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)


def _check_hook_result(name: str, parameter: Any, given: Any) -> Any:
    if isinstance(given, torch.Tensor) and given.shape == parameter.shape:
        return lay_out_gradient(given.to(parameter.dtype), parameter)
    what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
    raise PipelineError(
        f"a hook of parameter {name!r} returned {what}: it may return None, or a tensor of shape "
        f"{tuple(parameter.shape)}"
    )
