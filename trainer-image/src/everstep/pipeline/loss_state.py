"""State that a loss keeps from call to call, as a running centre, a count of its calls or the first value that it saw.

A pipeline calls a loss for each micro-batch, one process for each batch. So such a loss is refused where a batch is
cut; where it is not, calls before training leave it as it was.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.losses import Loss, compute_loss
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.compiled import disable_compilation
from everstep.pipeline.frontend.foreign_weights import WeightReads
from everstep.pipeline.frontend.script_draws import ScriptDraws

_log = logging.getLogger("everstep.pipeline")

_LARGEST = 1 << 20  # elements
_ROUNDING = 1e-5  # relative; sums on a GPU may come in another order each time


@contextlib.contextmanager
def loss_kept(loss: Loss) -> Iterator[None]:
    """Restore at the end what a loss keeps in attributes and buffers: of itself, or of the object that it is part of.

    What a function keeps in variables is not seen.
    """
    kept: list[tuple[Any, Any]] = []
    for holder in _list_holders(loss):
        held = vars(holder)
        kept.append((held, dict(held)))
        kept += [(each, each.copy()) for each in held.values() if type(each) in (dict, list, set)]
    inside = [each for _, before in kept for each in (before.values() if isinstance(before, dict) else before)]
    tensors = [(each, each.clone()) for each in inside if _is_small_state(each)]
    try:
        yield
    finally:
        for held, before in kept:
            _restore(held, before)
        for tensor, before in tensors:
            if not torch.equal(tensor, before):
                tensor.copy_(before)


def _restore(held: Any, before: Any) -> None:
    """Restore what has changed in a container, and touch nothing else: other threads may use it."""
    if isinstance(held, dict):
        for key in [key for key in held if key not in before]:
            del held[key]
        held.update({key: value for key, value in before.items() if key not in held or held[key] is not value})
    elif isinstance(held, list):
        if len(held) != len(before) or not all(map(is_, held, before)):
            held[:] = before
    else:
        held &= before
        held |= before


def call_twice(loss: Loss, output: Any, targets: Any, weight: Loss | None) -> tuple[float, float] | None:
    """Call a loss twice with the same, and leave it and random numbers as they were.

    Args:
        loss: The loss.
        output: What a model has returned.
        targets: Its targets.
        weight: As `EngineOptions.loss_weight`.

    Returns:
        Its two values; None if it fails, or draws random numbers from a generator of its own.
    """
    draws = ScriptDraws(loss if isinstance(loss, nn.Module) else nn.Module())
    drawn, values = draws.get_state(), list[float]()
    devices = {each.device.index or 0 for each in tensors_of(output) if each.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(devices)), loss_kept(loss), disable_compilation():
            for _ in range(2):
                torch.manual_seed(0)
                own, wanted = map_tensors((output, targets), lambda tensor: tensor.detach().clone())
                with WeightReads({}) as reads, draws.at(drawn):
                    values.append(float(compute_loss(loss, own, wanted, 1, weight).sum.detach()))
    except PipelineError:
        raise
    except Exception as error:
        _log.info("whether the loss keeps state was not checked: %s: %s", type(error).__name__, error)
        return None
    return None if reads.draws else (values[0], values[1])


def has_changed(one: float, other: float) -> bool:
    """Tell whether a loss has given two values for the same, and not only by rounding."""
    return abs(one - other) > _ROUNDING * max(abs(one), abs(other))


def refuse_state(one: float, other: float, times: int) -> None:
    """Refuse a loss that gives another value when it is called again with the same output and targets.

    Args:
        one: Its first value.
        other: Its second.
        times: How often it is called for a batch: micro-batches times replicas.

    Raises:
        PipelineError: It does.
    """
    if has_changed(one, other):
        raise PipelineError(
            f"the loss gives {one:.6g}, and {other:.6g} when it is called again with the same output and targets: it "
            "continues from state that it keeps, as a running mean or a count of its calls; a pipeline calls it for "
            f"each micro-batch, {times} times a batch over all replicas, and one process once. Change such state in "
            "the script, after each step, from the metrics that a loss gives as (sum, count, {'name': sum}); or take "
            "microbatches=1 and one replica. PlanOptions(check=False) trains it as it is"
        )


class Switches:
    """The numbers and flags of a loss that are 0 now: a script that changes one later may switch on a part of the loss,
    as a term whose weight grows.

    Args:
        loss: The loss. Of a function nothing is known.
    """

    def __init__(self, loss: Loss) -> None:
        held = [each for holder in _list_holders(loss) for each in (vars(holder), vars(holder).get("_buffers", {}))]
        self._off = [(each, name) for each in held for name in each if name != "training" and _is_off(each[name])]

    def take_changes(self) -> bool:
        """Tell whether one of them is not 0 any more, which is told once of each."""
        off = [(held, name) for held, name in self._off if _is_off(held.get(name, 0))]
        before, self._off = self._off, off
        return len(off) < len(before)


def _is_off(value: Any) -> bool:
    if isinstance(value, torch.Tensor):  # one on a GPU would be waited for
        return not value.dim() and value.device.type == "cpu" and not bool(value)
    return isinstance(value, bool | int | float) and not value


def _list_holders(loss: Any) -> list[Any]:
    holder = getattr(loss, "__self__", loss)
    if isinstance(holder, nn.Module):
        return list(holder.modules())
    return [holder] if hasattr(holder, "__dict__") and not isinstance(holder, FunctionType | ModuleType | type) else []


def _is_small_state(value: Any) -> bool:
    """Tell whether a value is a tensor that a loss may change; data of an object that it is part of are larger."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return plain and value.layout is torch.strided and value.device.type != "meta" and value.numel() <= _LARGEST
