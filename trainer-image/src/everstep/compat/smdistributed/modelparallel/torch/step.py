"""`@smp.step`: a function that is written for one micro-batch, run for all of them through the pipeline."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from everstep.compat.smdistributed.modelparallel.torch.comm import pack_object, unpack_object
from everstep.compat.smdistributed.modelparallel.torch.output import StepOutput, gather_outputs
from everstep.compat.smdistributed.modelparallel.torch.slicing import slice_argument
from everstep.compat.smdistributed.modelparallel.torch.state import SmpState, current_state
from everstep.compat.smdistributed.modelparallel.torch.step_body import StepBody

__all__ = ["StepOutput", "step"]


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[..., Any]:
    """Run the function for each micro-batch, in the order of the pipeline, on every process.

    Arguments are cut along their first axis, or as `input_split_axes` says, but for those in `non_split_inputs`. In the
    function, `model(...)` and `model.backward(loss)` are called once each; one that does not name `backward`, itself or
    in a function of its module that it calls, is an evaluation, and so is any under torch.no_grad(). What it returns is
    there on all processes of the pipeline, with a StepOutput for each tensor, and a list for anything else, of all
    micro-batches.
    """
    if function is None:
        return functools.partial(  # @smp.step(…)
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )
    signature = inspect.signature(function)
    differentiates = _calls_backward(inspect.unwrap(function), set())
    for name in (*non_split_inputs, *(input_split_axes or {})):
        if name not in signature.parameters:
            raise ValueError(f"smp.step: {function.__name__} has no argument {name!r}")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        training = differentiates and torch.is_grad_enabled()
        count = current_state().config.microbatches

        def part(index: int) -> Callable[[], Any]:
            mine = signature.bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                if name not in non_split_inputs:
                    mine.arguments[name] = slice_argument(
                        value, count, index, (input_split_axes or {}).get(name, 0), name
                    )
            return lambda: function(*mine.args, **mine.kwargs)

        bodies = [StepBody(part(index), training) for index in range(count)]
        return _run_through_pipeline(current_state(), bodies, training, detach_outputs)

    return run


def _calls_backward(function: Any, seen: set[Any]) -> bool:
    """Return whether a function names `backward`, or a function of its module that does."""
    function = getattr(function, "func", getattr(function, "__func__", function))  # of a partial, of a method
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return False
    seen.add(code)
    names = _collect_names(code)
    if "backward" in names:
        return True
    around = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    known = {**function.__globals__, **around}
    called = (known[name] for name in names | set(code.co_freevars) if name in known)
    return any(
        _calls_backward(each, seen) for each in called if getattr(each, "__module__", None) == function.__module__
    )


def _collect_names(code: CodeType) -> set[str]:
    """Return all names that a function uses, also in functions inside it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _collect_names(constant)
    return found


def _run_through_pipeline(now: SmpState, bodies: list[StepBody], training: bool, detach: bool) -> Any:
    if now.model is None:
        raise RuntimeError("smp.DistributedModel must wrap the model before a step function runs")
    try:
        for body in bodies:
            body.run()
            if body.arguments is None:
                raise RuntimeError("the step function did not call the model: it must, for each micro-batch")
        now.model.run(bodies, training)
        last = now.stage_rank == now.grid.ranks - 1
        mine = [_detach_returned(body.returned, detach and now.grid.ranks == 1) for body in bodies] if last else None
        return gather_outputs(_share_returned(now, mine, detach))
    finally:
        for body in bodies:
            body.end()


def _share_returned(now: SmpState, mine: list[Any] | None, detach: bool) -> list[Any]:
    """Return what the last process of the pipeline returned, on all of its processes; the graph stays where it was
    made."""
    import torch.distributed as dist

    if now.grid.ranks == 1:
        assert mine is not None
        return [_detach_returned(each, detach) for each in mine]
    box = [None if mine is None else pack_object([_detach_returned(each, True) for each in mine])]
    dist.broadcast_object_list(box, src=now.members["PP"][-1], group=now.groups["PP"])
    return list(unpack_object(box[0])) if mine is None else [_detach_returned(each, detach) for each in mine]


def _detach_returned(returned: Any, detach: bool) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach() if detach and isinstance(leaf, torch.Tensor) else leaf, returned)
