"""Refuse a loss that reads what a forward leaves behind, such as `self.aux_loss`, instead of what it returns.

The loss runs on the last stage. What other stages leave in attributes, lists or the dictionaries of hooks is on other
processes, and here there is what was there before: a zero, the result of another batch, or nothing. So it is with their
weights, of which there are copies here that nobody trains.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.losses import Loss, compute_loss
from everstep.pipeline.engine.microbatch import Parts, batch_size
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.attributes import Key
from everstep.pipeline.frontend.check import as_before
from everstep.pipeline.frontend.compiled import disable_compilation
from everstep.pipeline.frontend.foreign_weights import WeightReads, find_foreign, make_foreign_error
from everstep.pipeline.frontend.patches import listen_to_attributes
from everstep.pipeline.frontend.script_draws import ScriptDraws
from everstep.pipeline.frontend.trace import attributes_kept

_log = logging.getLogger("everstep.pipeline")

_SAMPLES = 8  # of the example
_WHY = (
    "the loss runs on the last stage, where values that other stages store are missing, or are those of another batch: "
    "let forward return it beside its result, as {'logits': …, 'aux': …}, and let the loss take it from there"
)


@dataclass(frozen=True)
class LossUses:
    """The uses that a loss makes of what is beside its arguments.

    Attributes:
        weights: The names of the model's parameters and buffers that it reads itself.
        values: What it gave when it was called twice with the same; None if that is not known, as where it draws
            random numbers from a generator of its own.
    """

    weights: tuple[str, ...] = ()
    values: tuple[float, float] | None = None


class WatchedLoss:
    """A loss of which the first call in training is watched.

    Raises:
        PipelineError: It reads an attribute that a forward leaves, or by whatever name a weight of another stage.
    """

    def __init__(self, loss: Loss, model: nn.Module, left: Collection[Key]) -> None:
        self.loss, self._left = loss, left
        self._model: nn.Module | None = model  # until it has been watched: a script may have dropped it

    def __call__(self, output: Any, targets: Any) -> Any:
        model = self._model
        if model is None or not torch.is_grad_enabled():
            return self.loss(output, targets)
        self._model = None
        foreign = find_foreign((*model.parameters(), *model.buffers()))
        with _refusing_reads(model, self._left), disable_compilation(), WeightReads(foreign) as reads:
            found = self.loss(output, targets)
        if reads.found:
            raise make_foreign_error(reads.found.values(), "the loss")
        return found


def check_left_behind(
    model: nn.Module,
    left: Collection[Key],
    inputs: Mapping[str, Any],
    targets: Any,
    loss: Loss,
    weight: Loss | None,
    unsplit_inputs: Collection[str],
) -> LossUses:
    """Compute the loss of an output twice: after the forward that gave it, and after the forward of another batch.

    Args:
        model: With its weights; nothing is computed where it has none here.
        left: The attributes that a forward leaves with something else in them, as far as they are known.
        inputs: The example by the names of arguments.
        targets: The example's.
        loss: As given to pipeline().
        weight: The same.
        unsplit_inputs: Arguments without samples.

    Returns:
        What the loss uses beside the output.

    Raises:
        PipelineError: The loss is another one, or reads one of the attributes.
    """
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(inputs)), *tensors_of(targets)]
    samples = None if isinstance(targets, Parts) else batch_size(dict(inputs), frozenset(unsplit_inputs))
    if any(each.device.type == "meta" for each in tensors) or not samples:
        return LossUses()
    device, count = tensors[0].device, min(samples, _SAMPLES)

    def take(given: Any, number: int, factor: float = 1.0) -> Any:
        def rows(tensor: torch.Tensor) -> torch.Tensor:
            own = tensor[:number] if tensor.dim() and len(tensor) == samples else tensor
            return own.to(device) * factor if factor != 1.0 and own.is_floating_point() else own.to(device, copy=True)

        return map_tensors(given, rows)

    def run(number: int, factor: float = 1.0) -> Any:
        given = {
            name: take(each, samples if name in unsplit_inputs else number, factor) for name, each in inputs.items()
        }
        return Arguments(model).call(model, given)

    def compute(output: Any) -> float:
        torch.manual_seed(0)
        # Copies, as of the output of the last stage: a loss may change in place what it is given.
        given = map_tensors(output, lambda tensor: tensor.clone())
        return float(compute_loss(loss, given, take(targets, count), count, weight).sum)

    draws = ScriptDraws(loss if isinstance(loss, nn.Module) else model)
    drawn = draws.get_state()
    try:
        with as_before(model), attributes_kept(model), torch.no_grad():
            output = run(count)
            with _refusing_reads(model, left), WeightReads(_list_addresses(model)) as reads, draws.at(drawn):
                one = compute(output)
            with draws.at(drawn):
                again = compute(output)
            run(max(1, count // 2), 0.9)
            with draws.at(drawn):
                other = compute(output)
    except PipelineError:
        raise
    except Exception as error:
        _log.info("whether the loss reads what forward stores was not checked: %s: %s", type(error).__name__, error)
        return LossUses()
    if one == again != other:  # one that draws otherwise each time, or counts its calls, says nothing
        raise PipelineError(
            f"the loss of one output is {one:.6g} after the forward that gave it, and {other:.6g} after the forward of "
            "another batch: it reads something that forward stores, as in an attribute, a list or a dictionary "
            f"that hooks fill; {_WHY}"
        )
    return LossUses(tuple(reads.found.values()), None if reads.draws else (one, again))


def _list_addresses(model: nn.Module) -> dict[int, str]:
    """Return the names of all weights by the addresses of their memory."""
    both = (*model.named_buffers(), *model.named_parameters())
    return {each.untyped_storage().data_ptr(): name for name, each in both if each.numel()}


@contextlib.contextmanager
def _refusing_reads(model: nn.Module, left: Collection[Key]) -> Iterator[None]:
    """PipelineError at the end if one of these attributes was read inside."""
    reads = _Reads(model, left)
    try:
        with listen_to_attributes(reads) if left else contextlib.nullcontext():
            yield
    except Exception as error:
        if not reads.found:
            raise
        raise _make_error(model, reads.found[0]) from error  # it may have failed for what it read
    if reads.found:
        raise _make_error(model, reads.found[0])


class _Reads:
    """The attributes among those that are `left` that somebody has read."""

    busy = False

    def __init__(self, model: nn.Module, left: Collection[Key]) -> None:
        self._left = {(id(model.get_submodule(path)), name): (path, name) for path, name in left}
        self.found: list[Key] = []

    def attribute(self, module: nn.Module, name: str, value: Any) -> None:
        if (key := self._left.get((id(module), name))) is not None:
            self.found.append(key)

    def absence(self, module: nn.Module, name: str) -> None:
        """A loss that finds nothing has nothing that a forward has left."""


def _make_error(model: nn.Module, key: Key) -> PipelineError:
    path, name = key
    kind = type(model.get_submodule(path)).__name__
    where = f"module {path!r} ({kind})" if path else f"the model ({kind})"
    return PipelineError(f"the loss reads the attribute {name!r} of {where}, which forward sets: {_WHY}")


def check_second_forward(
    model: nn.Module, inputs: Mapping[str, Any], unsplit_inputs: Collection[str], times: int
) -> str:
    """Run the model twice on the same samples, and on others in between; and once more after a first call with others.

    Args:
        model: With its weights; nothing is run where it has none here.
        inputs: The example by the names of arguments.
        unsplit_inputs: Arguments without samples.
        times: How often forward is called for a batch: micro-batches times replicas.

    Returns:
        Nothing: there is nothing to tell.

    Raises:
        PipelineError: The second result is another one: forward goes on from what it has kept; or that after a first
            call with other samples is: forward keeps what its first call computes from them.
    """
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(inputs))]
    samples = batch_size(dict(inputs), frozenset(unsplit_inputs))
    if any(each.device.type == "meta" for each in tensors) or not samples or not Arguments(model).fits(inputs):
        return ""
    device, count = tensors[0].device, min(samples, _SAMPLES)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, copy=True)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return copy(tensor[:count] if tensor.dim() and len(tensor) == samples else tensor)

    draws = ScriptDraws(model)
    drawn = draws.get_state()

    def other(tensor: torch.Tensor) -> torch.Tensor:
        own = take(tensor)
        own = own.flip(0) if own.dim() else own
        return own * 0.9 if own.is_floating_point() else own

    def alike(tensor: torch.Tensor) -> torch.Tensor:
        own = take(tensor)
        own = own[-1:].expand_as(own).clone() if own.dim() else own
        return own * 0.9 if own.is_floating_point() else own

    def run(change: Any = take) -> list[torch.Tensor]:
        given = {name: map_tensors(each, copy if name in unsplit_inputs else change) for name, each in inputs.items()}
        torch.manual_seed(0)
        with draws.at(drawn):
            return tensors_of(map_tensors(Arguments(model).call(model, given), torch.Tensor.clone))

    try:
        with as_before(model), attributes_kept(model), torch.no_grad():
            run()  # which may make tables
            one = run()
            run(other)
            again = run()
        with as_before(model), attributes_kept(model), torch.no_grad():
            run(alike)
            later = run()
    except Exception as error:
        _log.info("whether forward keeps state was not checked: %s: %s", type(error).__name__, error)
        return ""
    advice = f"a pipeline calls it for each micro-batch, {times} times a batch over all replicas, and one process once"
    if not _differ(one, again) and _differ(one, later):
        raise PipelineError(
            "the model gives something else after a first call with other samples: forward keeps what its first call "
            f"computes from them, in an attribute or a buffer; {advice}: set it in the script before pipeline(), from "
            "a whole batch, or take microbatches=1 and one replica; PlanOptions(check=False) trains it as it is"
        )
    if _differ(one, again):
        raise PipelineError(
            "the model gives something else when it is called again with the same arguments: forward continues from "
            f"state that it keeps in an attribute, a list or a variable, and hands from batch to batch; {advice}: "
            "give such a state as an argument and return the next, or take microbatches=1 and one replica; "
            "PlanOptions(check=False) trains it as it is"
        )
    return ""


def _differ(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Tell whether two results differ by more than what the order of sums does."""
    if [each.shape for each in ones] != [each.shape for each in others]:
        return True
    for one, other in zip(ones, others, strict=True):
        if not (one.is_floating_point() or one.is_complex()):
            if not torch.equal(one, other):
                return True
            continue
        finite = one[one.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        tolerance = 1e-8 if one.dtype in (torch.float64, torch.complex128) else 8 * torch.finfo(one.dtype).eps
        if not torch.allclose(one, other, rtol=0.0, atol=max(tolerance, 1e-8) * largest, equal_nan=True):
            return True
    return False
