"""Check before training that the stages are the model, and that the loss of a batch is that of its samples."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.losses import Loss, LossPart, compute_loss
from everstep.pipeline.engine.microbatch import Parts, batch_size, compute_bounds, split_batch
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.autocast import casting_to
from everstep.pipeline.frontend.check import as_before, compare_gradients, find_mixing_nodes
from everstep.pipeline.frontend.split import node_modules
from everstep.pipeline.frontend.stages import StageModule
from everstep.pipeline.frontend.trace import Traced, attributes_kept
from everstep.pipeline.frontend.tree import Tree
from everstep.pipeline.left_behind import WatchedLoss
from everstep.pipeline.loss_state import call_twice, refuse_state
from everstep.pipeline.repeatable_modes import differs_in_training, evaluation_mode, repeatable_training

_log = logging.getLogger("everstep.pipeline")

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_TARGETS = "targets:"  # beside the arguments, of which none has such a name
_IN_LOSS = "the loss takes them together, or counts something else than samples"
_SAMPLES = 4  # of the example: the fewer there are, the more it shows that each meets fewer others
# Relative, of losses and of gradients. A balance of experts is taken over a batch, too, and is a small part of a loss:
# what a model returns beside what it makes of each sample may differ by that.
_OF_SAMPLES, _OF_NUMBERS = 1e-3, 0.1
# The losses of all words are alike before training, so that only gradients show which words count how much.
_OF_GRADIENTS = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-2, torch.complex64: 1e-2}
_OF_NARROW = 0.2

Gradients = list[torch.Tensor | None]
Ran = tuple[Any, LossPart, Gradients]  # an output, its loss, and what follows from that


def compare_stages(
    model: nn.Module,
    found: Traced | Tree,
    parts: Sequence[StageModule],
    batch: Mapping[str, Any],
    autocast: torch.dtype | None = None,
) -> str:
    """Compares the stages with the model, where that has weights here, under the `autocast` of the steps. There is
    nothing to tell: else it is refused."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(batch))]
    if any(each.device.type == "meta" for each in tensors) or not Arguments(model).fits(batch):
        return ""
    batch = map_tensors(dict(batch), lambda tensor: tensor.to(tensors[0].device))
    types = [each.dtype for each in tensors] + ([] if autocast is None else [autocast])
    tolerance = max(_TOLERANCE.get(each, 0.0) for each in types)
    modules = {each for whole in (model, *(part.module for part in parts)) for each in whole.modules()}
    flags = {each: each.training for each in modules}
    # Dropout draws in the order of the stages, in the engine by names: what is compared must draw nothing.
    quiet = not isinstance(found, Traced) or found.both
    # What code does that no trace follows is not known.
    has_hooks = (
        isinstance(found, Tree)
        or any(part.listens for part in parts)
        or any(call.opaque for call in found.record.root.all_calls())
    )
    try:
        for each in modules if quiet else ():
            each.training = False
        with casting_to(autocast, tensors[0].device.type):
            compare_gradients(model, parts, batch, _project_output, tolerance=tolerance, has_hooks=has_hooks)
    except torch.OutOfMemoryError:
        _log.warning("the stages were not compared with the model: there is not enough memory for both")
    except PipelineError as error:
        if isinstance(found, Tree):
            raise PipelineError(
                f"{error}; it is cut between its blocks ({', '.join(found.blocks[:4])}, …), each of which is called "
                "with what the one before gave, and what else its forward does is left out: move that into the blocks"
            ) from error
        raise
    except Exception as error:
        if Arguments(model).fits_by_name(batch):
            raise
        # It is given what the first of the blocks takes, and may take something else.
        _log.warning("the stages were not compared with the model: %s: %s", type(error).__name__, error)
    finally:
        for each, flag in flags.items():
            each.training = flag
    return ""


def _project_output(output: Any) -> Any:
    """A number to which every element of a result contributes in its own way."""
    total = torch.zeros((), device="cpu")
    for each in tensors_of(output):
        if each.requires_grad:
            row = each.reshape(-1).float() if each.dtype in (torch.float16, torch.bfloat16) else each.reshape(-1)
            total = total.to(row) + (row * torch.cos(torch.arange(len(row), device=row.device))).sum()
    return total


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
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(inputs)), *tensors_of(targets)]
    samples = None if isinstance(targets, Parts) else batch_size(dict(inputs), unsplit_inputs)
    if any(each.device.type == "meta" for each in tensors) or not samples or samples < 2:
        return []
    device, count = tensors[0].device, min(samples, _SAMPLES)

    def take(number: int) -> dict[str, Any]:
        given = {**inputs, _TARGETS: targets}.items()
        return {name: each if name in unsplit_inputs else _take_samples(each, samples, number) for name, each in given}

    many = min(samples, 2 * microbatch)
    learning = [each for each in model.parameters() if each.requires_grad]
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    idle, of_learning = set(names), list[bool]()

    def run(given: Mapping[str, Any], number: int, *, is_differentiated: bool = True) -> Ran:
        here = {key: map_tensors(each, lambda tensor: tensor.to(device).clone()) for key, each in given.items()}
        own = here.pop(_TARGETS)
        output = Arguments(model).call(model, here)
        if torch.is_grad_enabled():
            of_learning[:] = [each.requires_grad for each in tensors_of(output)]
        part = (
            _measure_rows(output, number, of_learning)
            if loss is None
            else compute_loss(loss, output, own, number, weight)
        )
        slope = _differentiate(part, learning if is_differentiated else [])
        idle.difference_update(name for name, each in zip(names, slope, strict=False) if each is not None)
        return map_tensors(output, torch.Tensor.detach), part, slope

    def find(number: int, compare: Callable[..., _Difference | None]) -> _Difference | None:
        try:
            for mode in (evaluation_mode, repeatable_training) if differs_in_training(found) else (evaluation_mode,):
                with mode(model), as_before(model), attributes_kept(model), torch.enable_grad():
                    if (apart := compare(run, take(number), number, unsplit_inputs)) is not None:
                        return apart
        except PipelineError:
            raise
        except Exception as error:
            _log.info("whether %s samples meet was not checked: %s: %s", number, type(error).__name__, error)
            idle.clear()
        return None

    apart = find(count, partial(_find_difference, combine=_add, least=least))
    if apart is None and many > count:
        apart = find(many, _find_difference_of_many)
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
    """A loss that looks at the first micro-batch whether it takes samples together, where no targets were there before.

    Raises:
        PipelineError: It does, as check_samples().
    """

    def __init__(self, loss: Loss, weight: Loss | None, times: int) -> None:
        self._loss, self._weight, self._times = loss, weight, times
        self._looked, self._is_new = False, True

    def __call__(self, output: Any, targets: Any) -> Any:
        if self._is_new and torch.is_grad_enabled():
            self._is_new = False
            own = self._loss.loss if isinstance(self._loss, WatchedLoss) else self._loss
            if (values := call_twice(own, output, targets, self._weight)) is not None:
                refuse_state(*values, self._times)
        if not self._looked and torch.is_grad_enabled():
            self._look(output, targets)
        return self._loss(output, targets)

    def _look(self, output: Any, targets: Any) -> None:
        tensors = [*tensors_of(output), *tensors_of(targets)]
        samples = next((len(each) for each in tensors_of(targets) if each.dim()), 0)
        # Another dimension of this size may be that of the samples: then nobody knows which one it is.
        self._looked = samples > 1 or any(not each.dim() or each.shape.count(samples) != 1 for each in tensors)
        if samples < 2 or any(not each.dim() or len(each) != samples for each in tensors):
            return
        if any(each.shape.count(samples) != 1 for each in tensors):
            return
        count = min(samples, _SAMPLES)
        some = {"output": _take_samples(output, samples, count), _TARGETS: _take_samples(targets, samples, count)}

        def run(given: Mapping[str, Any], number: int, *, is_differentiated: bool = True) -> Ran:
            here = {key: map_tensors(each, lambda tensor: tensor.detach().clone()) for key, each in given.items()}
            # The output is what it is: only the loss is looked at.
            leaves = [each.requires_grad_() for each in tensors_of(here["output"]) if each.is_floating_point()]
            part = compute_loss(self._loss, here["output"], here[_TARGETS], number, self._weight)
            return here["output"], part, _differentiate(part, leaves if is_differentiated else [])

        devices = {each.device.index or 0 for each in tensors if each.device.type == "cuda"}
        try:
            with torch.random.fork_rng(sorted(devices)):
                apart = _find_difference(run, some, count, frozenset(), combine=_join)
        except PipelineError:
            raise
        except Exception as error:
            _log.info("whether the loss takes samples together was not checked: %s: %s", type(error).__name__, error)
            return
        if apart is not None:
            raise apart.error(_IN_LOSS)


@dataclass(frozen=True)
class _Difference:
    """The losses of some samples, `at_once` and in `parts`. `gradients`: how far those are apart, relative to their
    norm, where they are known; `alike`: the model makes the same of each sample."""

    samples: int
    parts: int
    at_once: float
    together: float
    gradients: float | None
    alike: bool

    def error(self, where: str, *, has_loss: bool = True) -> PipelineError:
        what = "the loss" if has_loss else "a sum of squares of what the model returns"
        advice = (
            "For a mean over tokens or weights, give (sum, count) or EngineOptions.loss_weight; where each sample is "
            "compared with all others of a batch (InfoNCE, CLIP), take microbatches=1 and one replica, or let one "
            "sample be all that are compared"
            if has_loss
            else "Take microbatches=1 and one replica, or give pipeline() the example's targets if the loss leaves out "
            "what samples have to do with each other"
        )
        gradients = "" if self.gradients is None else f", and gradients differ by {self.gradients:.1%}"
        return PipelineError(
            f"{what} of {self.samples} samples is {self.at_once:.6g} at once and {self.together:.6g} in {self.parts} "
            f"parts{gradients}, so micro-batches and replicas would train something "
            f"else than the batch: {where}. {advice}; PlanOptions(check=False) trains it as it is"
        )


def _find_difference(
    run: Callable[..., Ran],
    some: Mapping[str, Any],
    count: int,
    unsplit_inputs: frozenset[str],
    *,
    combine: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    least: int = 1,
) -> _Difference | None:
    """Find how the loss and the gradients of halves, or of `least` samples, differ from those of all samples at once.

    `combine` makes the gradient of all from those of parts. None if random numbers are drawn, which make it differ
    anyway.
    """
    torch.manual_seed(0)
    output, at_once, slope = run(some, count)
    torch.manual_seed(1)
    if float(run(some, count, is_differentiated=False)[1].sum.detach()) != float(at_once.sum.detach()):
        return None
    rounding = 8 * torch.finfo(at_once.sum.dtype).eps if at_once.sum.is_floating_point() else 0.0
    for parts in sorted({2, max(count // least, 2)}):
        made = [
            run(part, stop - start)
            for part, (start, stop) in zip(
                split_batch(dict(some), count, parts, unsplit_inputs), compute_bounds(count, parts), strict=True
            )
        ]
        has_numbers, alike = _compare_rows(output, [each for each, _, _ in made], count)
        one, other, difference = _compute_mean_losses(at_once, [part for _, part, _ in made])
        slopes, allowed = _compare_gradients(at_once, slope, made, combine)
        bound = _OF_NUMBERS if has_numbers and alike else 0.0
        if difference > max(bound, _OF_SAMPLES, rounding) or slopes > max(bound, allowed):
            return _Difference(count, parts, one, other, slopes, alike and not has_numbers)
    return None


def _find_difference_of_many(
    run: Callable[..., Ran], some: Mapping[str, Any], count: int, unsplit_inputs: frozenset[str]
) -> _Difference | None:
    """Find how the loss of two micro-batches differs at once; None if random numbers are drawn."""
    halves = [
        (part, stop - start)
        for part, (start, stop) in zip(
            split_batch(dict(some), count, 2, unsplit_inputs), compute_bounds(count, 2), strict=True
        )
    ]
    with torch.no_grad():
        made = []
        for seed, (part, number) in enumerate((halves[0], *halves)):
            torch.manual_seed(seed)
            made.append(run(part, number, is_differentiated=False))
        if float(made.pop(0)[1].sum) != float(made[0][1].sum):
            return None
        output, at_once, _ = run(some, count, is_differentiated=False)
    rounding = 8 * torch.finfo(at_once.sum.dtype).eps if at_once.sum.is_floating_point() else 0.0
    one, other, difference = _compute_mean_losses(at_once, [part for _, part, _ in made])
    outputs = [each for each, _, _ in made]
    has_numbers, alike = _compare_rows(output, outputs, count)
    meet = _differ_in_rows(output, outputs, count)
    least = _OF_NUMBERS if has_numbers and alike else _OF_SAMPLES
    if difference > (rounding if meet else max(least, rounding)):
        return _Difference(count, 2, one, other, None, alike=alike and not has_numbers and not meet)
    return None


def _differentiate(part: LossPart, sources: Sequence[torch.Tensor]) -> Gradients:
    """The gradients of a loss; none where it has none, or where they cannot be taken in evaluation, as by cuDNN."""
    if not part.sum.requires_grad or not sources:
        return []
    try:
        return list(torch.autograd.grad(part.sum, sources, allow_unused=True))
    except RuntimeError as error:
        _log.info("gradients of samples were not compared: %s", error)
        return []


def _compare_gradients(
    at_once: LossPart,
    slope: Gradients,
    made: Sequence[Ran],
    combine: Callable[[Sequence[torch.Tensor]], torch.Tensor],
) -> tuple[float, float]:
    """Return how far the gradients of the mean loss are apart, and how far rounding may bring them, by their norm."""
    total = sum(float(part.count) for _, part, _ in made)
    if not total or not float(at_once.count) or any(len(each) != len(slope) for _, _, each in made):
        return 0.0, 0.0
    apart, norm, allowed = 0.0, 0.0, 0.0
    for one, *parts in zip(slope, *(each for _, _, each in made), strict=True):
        given = [each for each in parts if each is not None]  # None of an expert without words
        if one is None or not given:
            continue
        wanted, found = one / float(at_once.count), combine(given) / total
        if wanted.shape != found.shape:
            continue
        apart += float((wanted - found).abs().double().square().sum())
        norm += float(wanted.abs().double().square().sum())
        allowed = max(allowed, _OF_GRADIENTS.get(one.dtype, _OF_NARROW))
    return (apart / norm) ** 0.5 if norm else 0.0, allowed


def _add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts))


def _take_samples(given: Any, samples: int, count: int) -> Any:
    """The first of some samples."""
    return map_tensors(given, lambda tensor: tensor[:count] if tensor.dim() and len(tensor) == samples else tensor)


def _compare_rows(output: Any, halves: Sequence[Any], count: int) -> tuple[bool, bool]:
    """Tell whether a model returns something beside what it makes of each sample, and whether that of the halves is
    what it made of the samples at once."""
    ones, others = tensors_of(output), [tensors_of(half) for half in halves]
    if any(len(each) != len(ones) for each in others):
        return True, False
    has_numbers, alike = False, True
    for one, *parts in zip(ones, *others, strict=True):
        if not one.dim() or len(one) != count or any(part.shape[1:] != one.shape[1:] for part in parts):
            has_numbers, alike = True, alike and not one.dim()
        else:
            alike = alike and _are_equal(one, torch.cat(parts))
    return has_numbers, alike


def _differ_in_rows(output: Any, halves: Sequence[Any], count: int) -> bool:
    """Tell whether a model makes another thing of a sample where there are more."""
    for one, *parts in zip(tensors_of(output), *map(tensors_of, halves), strict=False):
        is_of_samples = one.dim() and len(one) == count and all(part.shape[1:] == one.shape[1:] for part in parts)
        if is_of_samples and sum(map(len, parts)) == count and not _are_equal(one, torch.cat(parts)):
            return True
    return False


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors differ by rounding only, relative to the largest number."""
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, other))
    one, other = one.detach(), other.detach()
    finite = one[one.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    tolerance = 1e-6 if one.dtype in (torch.float64, torch.complex128) else max(5e-3, 8 * torch.finfo(one.dtype).eps)
    return bool(torch.allclose(one, other, rtol=0.0, atol=tolerance * largest, equal_nan=True))


def _compute_mean_losses(at_once: LossPart, made: Sequence[LossPart]) -> tuple[float, float, float]:
    """The loss at once, that of the parts together, and how far they are apart, relative to the largest of them."""
    parts = [(float(part.sum.detach()), float(part.count)) for part in (at_once, *made)]
    total, count = (sum(each) for each in zip(*parts[1:], strict=True))
    if not parts[0][1] or not count:
        return 0.0, 0.0, 0.0
    one, two = parts[0][0] / parts[0][1], total / count
    return one, two, abs(one - two) / max([*(abs(sum_ / of) for sum_, of in parts if of), 1e-12])
