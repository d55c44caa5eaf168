"""Check before training that the loss of a batch is that of its samples."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.losses import Loss, LossPart, compute_loss
from everstep.pipeline.engine.microbatch import Parts, batch_size
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.check import as_before, find_mixing_nodes
from everstep.pipeline.frontend.compiled import disable_compilation
from everstep.pipeline.frontend.script_draws import ScriptDraws
from everstep.pipeline.frontend.split import node_modules
from everstep.pipeline.frontend.trace import Traced, attributes_kept
from everstep.pipeline.frontend.tree import Tree
from everstep.pipeline.left_behind import WatchedLoss
from everstep.pipeline.loss_state import Switches, call_twice, loss_kept, refuse_state
from everstep.pipeline.repeatable_modes import CopiedDropout, differs_in_training, evaluation_mode, repeatable_training
from everstep.pipeline.sample_differences import (
    Ran,
    SampleDifference,
    add_parts,
    are_alike,
    differentiate,
    fill_small,
    find_difference,
    find_difference_of_many,
    join_parts,
    join_samples,
    look_again,
    take_samples,
    vary_tensors,
)

_log = logging.getLogger("everstep.pipeline")

_TARGETS = "targets:"  # beside the arguments, of which none has such a name
_IN_LOSS = "the loss takes them together, or counts something else than samples"
_SAMPLES = 4  # of the example: the fewer there are, the more it shows that each meets fewer others


def check_samples(
    model: nn.Module,
    found: Traced | Tree,
    inputs: Mapping[str, Any],
    targets: Any,
    loss: Loss | None,
    weight: Loss | None,
    unsplit_inputs: frozenset[str],
    microbatch: int = 0,
    least: int = 1,
) -> list[str]:
    """Compare the loss of some samples with that of their halves, by the model as it evaluates; and as it trains, but
    for dropout and batch normalisation, where it does something else then.

    So are two micro-batches with each of them, without gradients: what has room for so many samples, as an expert with
    a capacity, leaves none out where they are few.

    Args:
        model: With its weights; nothing is compared where it has none here.
        found: The same, as it can be cut.
        inputs: The example by the names of arguments.
        targets: The example's; None if they are not known.
        loss: As given to pipeline(); None to look at what the model makes of each sample, where targets are not known.
        weight: The same.
        unsplit_inputs: Arguments without samples.
        microbatch: The samples of a micro-batch; `least`: the fewest that one may have.

    Returns:
        The names of the parameters that learn and of which the loss has no gradient, as far as that is known.

    Raises:
        PipelineError: They differ: a batch is more than its samples, and micro-batches would train something else.
    """
    samples = None if isinstance(targets, Parts) else batch_size(dict(inputs), unsplit_inputs)
    if not samples or not has_samples(model, inputs, targets, unsplit_inputs):
        return []
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(inputs)), *tensors_of(targets)]
    device, count = tensors[0].device, min(samples, _SAMPLES)

    def take(number: int) -> dict[str, Any]:
        given = {**inputs, _TARGETS: targets}.items()
        return {name: each if name in unsplit_inputs else take_samples(each, samples, number) for name, each in given}

    many = min(samples, 2 * microbatch)
    learning = [each for each in model.parameters() if each.requires_grad]
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    idle, of_learning = set(names), list[bool]()
    modes = (evaluation_mode, repeatable_training) if differs_in_training(found) else (evaluation_mode,)

    def run(given: Mapping[str, Any], number: int, *, is_differentiated: bool = True) -> Ran:
        here = {key: map_tensors(each, lambda tensor: tensor.to(device).clone()) for key, each in given.items()}
        own = here.pop(_TARGETS)
        with CopiedDropout():
            output = Arguments(model).call(model, here)
        if torch.is_grad_enabled():
            of_learning[:] = [each.requires_grad for each in tensors_of(output)]
        part = (
            _measure_rows(output, number, of_learning)
            if loss is None
            else compute_loss(loss, output, own, number, weight)
        )
        slope = differentiate(part, learning if is_differentiated else [])
        idle.difference_update(name for name, each in zip(names, slope, strict=False) if each is not None)
        return map_tensors(output, torch.Tensor.detach), part, slope

    def find(number: int, compare: Callable[..., SampleDifference | None]) -> SampleDifference | None:
        for mode in modes:
            try:
                with mode(model), as_before(model), attributes_kept(model), torch.enable_grad():
                    look = partial(compare, run, take(number), number, unsplit_inputs)
                    apart = look()
                    if apart is None and number == count and fill_small(learning):
                        apart = look()  # behind a last layer of small weights, all samples were alike
                    if apart is not None:
                        # By the gradients of a few samples, also where those of many would need too much memory.
                        few = partial(run, take(count), count)
                        apart = look_again(apart, few, partial(vary_tensors, learning), look)
            except PipelineError:
                raise
            except Exception as error:
                _log.info("whether %s samples meet was not checked: %s: %s", number, type(error).__name__, error)
                if mode is modes[-1]:  # before, a model may return something else, which the loss does not take
                    idle.clear()
                continue
            if apart is not None:
                return apart
        return None

    apart = find(count, partial(find_difference, combine=add_parts, least=least))
    if apart is None and many > count:
        apart = find(many, partial(find_difference_of_many, least=least))
    if apart is None:
        return sorted(idle) if len(idle) < len(names) else []
    where = "they meet in the model" if loss is None else _IN_LOSS
    if not apart.alike:
        some = take(apart.samples)
        del some[_TARGETS]
        meeting: list[str] = []
        # Only for the names: a value whose samples are another dimension cannot be cut.
        with contextlib.suppress(RuntimeError, PipelineError):  # as of a model that is cut for training only
            meeting = find_mixing_nodes(node_modules(found), some, model) if isinstance(found, Traced) else []
        where = f"they meet in the model ({', '.join(meeting[:4]) or 'where is not known'})"
    raise apart.error(where, has_loss=loss is not None)


def has_samples(model: nn.Module, inputs: Mapping[str, Any], targets: Any, unsplit_inputs: frozenset[str]) -> bool:
    """Tell whether check_samples() has weights, and several samples."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(inputs)), *tensors_of(targets)]
    is_empty = any(each.device.type == "meta" for each in tensors)
    return not is_empty and (batch_size(dict(inputs), unsplit_inputs) or 0) > 1


def _measure_rows(output: Any, samples: int, of_learning: Sequence[bool]) -> LossPart:
    """A number to which each sample contributes, whatever the others are: of what learns, squares, which do not cancel
    each other out."""
    total: Any = torch.zeros((), device="cpu")
    for each, learns in zip(tensors_of(output), of_learning, strict=False):
        if learns and each.dim() and len(each) == samples and not each.is_complex():
            rows = each.reshape(samples, -1).float() if each.dtype.itemsize < 4 else each.reshape(samples, -1)
            weights = 1.5 + torch.cos(torch.arange(rows.shape[1], device=rows.device))
            total = total.to(rows) + (rows.square() * weights).where(rows.detach().isfinite(), 0.0).sum()
    return LossPart(total, samples, {})


class FirstLook:
    """A loss that looks at the first micro-batch whether it takes samples together, where that is not known yet; at two
    where each has one sample. It looks again once a number of its own is not 0 any more.

    Raises:
        PipelineError: It does, as check_samples().
    """

    def __init__(self, loss: Loss, weight: Loss | None, times: int, *, is_known: bool = False) -> None:
        self._loss, self._weight, self._times = loss, weight, times
        self._looked, self._is_new = is_known, not is_known
        self._alone: Any = None  # the output and the targets of one sample
        self._calls, self._next = 0, 1  # how many there were while this was open, and in which of them it looks
        self._switches = Switches(self._own_loss)

    def __call__(self, output: Any, targets: Any) -> Any:
        if self._is_new and torch.is_grad_enabled():
            self._is_new = False
            if (values := call_twice(self._own_loss, output, targets, self._weight)) is not None:
                refuse_state(*values, self._times)
        if torch.is_grad_enabled():
            if self._switches.take_changes():
                self._looked, self._calls, self._next = False, 0, 1
            self._calls += not self._looked
            if not self._looked and self._calls >= self._next:
                self._look(output, targets)
        return self._loss(output, targets)

    @property
    def _own_loss(self) -> Loss:
        return self._loss.loss if isinstance(self._loss, WatchedLoss) else self._loss

    def _look(self, output: Any, targets: Any) -> None:
        # Targets without dimensions go whole to each micro-batch; where all are such, the output tells of samples.
        tensors = [*(each for each in tensors_of(targets) if each.dim()), *tensors_of(output)]
        samples = next((len(each) for each in tensors if each.dim()), -1)
        is_cut = all(each.dim() and len(each) == samples for each in tensors)
        if samples in (0, 1):
            # A single number may be of no sample, as what a model learns to scale others by.
            if samples and is_cut and all(each.dim() > 1 for each in tensors_of(output)):
                self._look_at_two(map_tensors((output, targets), lambda tensor: tensor.detach().clone()))
            return
        # Another dimension of this size may be that of the samples: then nobody knows which one it is.
        self._leave_open_if_alike(output)
        if samples > 1 and is_cut and all(each.shape.count(samples) == 1 for each in tensors):
            self._compare(output, targets, samples, is_sure=True)

    def _look_at_two(self, alone: Any) -> None:
        before, self._alone = self._alone, alone
        if before is not None and (both := join_samples(before, alone)) is not None:
            self._alone = None
            self._leave_open_if_alike(both[0])
            self._compare(both[0], both[1], 2, is_sure=False)

    def _leave_open_if_alike(self, output: Any) -> None:
        """Behind a last layer of zeros samples are alike, and nothing shows of them: later outputs do. What is always
        alike, as a number that is repeated for each sample, is looked at ever more rarely."""
        self._looked = not any(are_alike(each) for each in tensors_of(output))
        self._next = 2 * self._calls

    def _compare(self, output: Any, targets: Any, samples: int, *, is_sure: bool) -> None:
        count = min(samples, _SAMPLES)
        some = {"output": take_samples(output, samples, count), _TARGETS: take_samples(targets, samples, count)}

        def run(given: Mapping[str, Any], number: int, *, is_differentiated: bool = True) -> Ran:
            here = {key: map_tensors(each, lambda tensor: tensor.detach().clone()) for key, each in given.items()}
            # The output is what it is: only the loss is looked at.
            leaves = [each.requires_grad_() for each in tensors_of(here["output"]) if each.is_floating_point()]
            part = compute_loss(self._loss, here["output"], here[_TARGETS], number, self._weight)
            return here["output"], part, differentiate(part, leaves if is_differentiated else [])

        def vary() -> None:
            some["output"] = map_tensors(some["output"], lambda tensor: tensor.detach().clone())
            vary_tensors([each for each in tensors_of(some["output"]) if each.is_floating_point()])

        look = partial(find_difference, run, some, count, frozenset(), combine=join_parts)
        devices = {each.device.index or 0 for each in tensors_of(output) if each.device.type == "cuda"}
        own = self._own_loss
        draws = ScriptDraws(own if isinstance(own, nn.Module) else nn.Module())
        try:
            with (
                torch.random.fork_rng(sorted(devices)),
                draws.at(draws.get_state()),
                loss_kept(own),
                disable_compilation(),
            ):
                if (apart := look()) is not None:
                    apart = look_again(apart, partial(run, some, count), vary, look)
        except PipelineError:
            if is_sure:
                raise
            return  # something in the output may be of no sample, and have a first dimension of 1
        except Exception as error:
            _log.info("whether the loss takes samples together was not checked: %s: %s", type(error).__name__, error)
            return
        if apart is not None:
            raise apart.error(_IN_LOSS)
