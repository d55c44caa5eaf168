"""Find how the loss of some samples at once differs from that of their parts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from everstep.pipeline.engine.losses import LossPart
from everstep.pipeline.engine.microbatch import compute_bounds, split_batch
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError

_log = logging.getLogger("everstep.pipeline")

# Relative, of losses and of gradients. A balance of experts is taken over a batch, too, and is a small part of a loss:
# what a model returns beside what it makes of each sample may differ by that.
_OF_SAMPLES, _OF_NUMBERS = 1e-3, 0.1
# The losses of all words are alike before training, so that only gradients show which words count how much.
_OF_GRADIENTS = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-2, torch.complex64: 1e-2}
_OF_NARROW = 0.2
_REPEATED = 1e-5  # relative; what draws random numbers differs by more
_SMALL = 0.1  # relative to weights that keep the size of what they are given
_CANCELLED, _SINGLE = 1 / 16, 8  # relative to the largest loss of so many single samples

Gradients = list[torch.Tensor | None]
Ran = tuple[Any, LossPart, Gradients]  # an output, its loss, and what follows from that


@dataclass(frozen=True)
class SampleDifference:
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
        is_known = self.gradients is not None and math.isfinite(self.gradients)
        gradients = f", and gradients differ by {self.gradients:.1%}" if is_known else ""
        return PipelineError(
            f"{what} of {self.samples} samples is {self.at_once:.6g} at once and {self.together:.6g} in {self.parts} "
            f"parts{gradients}, so micro-batches and replicas would train something "
            f"else than the batch: {where}. {advice}; PlanOptions(check=False) trains it as it is"
        )


def find_difference(
    run: Callable[..., Ran],
    some: Mapping[str, Any],
    count: int,
    unsplit_inputs: frozenset[str],
    *,
    combine: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    least: int = 1,
) -> SampleDifference | None:
    """Find how the loss and the gradients of halves, or of `least` samples, differ from those of all samples at once.

    `combine` makes the gradient of all from those of parts. None if random numbers are drawn, which make it differ
    anyway.
    """
    torch.manual_seed(0)
    output, at_once, slope = run(some, count)
    torch.manual_seed(1)
    if not _is_repeated(run(some, count), at_once, slope, combine):
        return None
    rounding = 8 * torch.finfo(at_once.sum.dtype).eps if at_once.sum.is_floating_point() else 0.0
    for parts in sorted({2, max(count // least, 2)}):
        made = _run_parts(run, some, count, parts, unsplit_inputs)
        has_numbers, alike = _compare_rows(output, [each for each, _, _ in made], count)
        one, other, difference = _compute_mean_losses(at_once, [part for _, part, _ in made])
        slopes = _compare_gradients(at_once, slope, made, combine)
        bound = _OF_NUMBERS if has_numbers and alike else 0.0
        # Where each gradient is the same, so is what is trained: of terms that cancel each other only rounding is left.
        differs = difference > max(bound, _OF_SAMPLES, rounding) and not slopes.are_same
        if differs or slopes.apart > max(bound, slopes.allowed):
            return SampleDifference(count, parts, one, other, slopes.apart, alike and not has_numbers)
    return None


def _run_parts(
    run: Callable[..., Ran], some: Mapping[str, Any], count: int, parts: int, unsplit_inputs: frozenset[str]
) -> list[Ran]:
    split = split_batch(dict(some), count, parts, unsplit_inputs)
    try:
        return [
            run(part, stop - start) for part, (start, stop) in zip(split, compute_bounds(count, parts), strict=True)
        ]
    except PipelineError:
        raise
    except Exception as error:
        # The first step says the same of its micro-batches, and not why: there, nobody knows that more were enough.
        _log.warning(
            "the model and its loss take %s samples, and not %s parts of them (%s: %s): where each sample is compared "
            "with all others of a batch, as by the labels of CLIP, micro-batches and replicas have too few of them: "
            "take microbatches=1 and one replica",
            count,
            parts,
            type(error).__name__,
            error,
        )
        raise


def find_difference_of_many(
    run: Callable[..., Ran],
    some: Mapping[str, Any],
    count: int,
    unsplit_inputs: frozenset[str],
    *,
    least: int = 1,
) -> SampleDifference | None:
    """Find how the loss of two micro-batches, of `least` samples each at least, differs at once; None if random numbers
    are drawn."""
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
        if not _are_repeated(made.pop(0)[1], made[0][1]):
            return None
        output, at_once, _ = run(some, count, is_differentiated=False)
    rounding = 8 * torch.finfo(at_once.sum.dtype).eps if at_once.sum.is_floating_point() else 0.0
    one, other, difference = _compute_mean_losses(at_once, [part for _, part, _ in made])
    outputs = [each for each, _, _ in made]
    has_numbers, alike = _compare_rows(output, outputs, count)
    meet = _differ_in_rows(output, outputs, count)
    bound = _OF_NUMBERS if has_numbers and alike else _OF_SAMPLES
    if difference <= (rounding if meet else max(bound, rounding)):
        return None
    if not meet and _cancel(run, some, count, unsplit_inputs, (one, other), least):
        return None
    return SampleDifference(count, 2, one, other, None, alike=alike and not has_numbers and not meet)


def _cancel(
    run: Callable[..., Ran],
    some: Mapping[str, Any],
    count: int,
    unsplit_inputs: frozenset[str],
    losses: tuple[float, float],
    least: int,
) -> bool:
    """Tell whether losses are apart by what rounding is of those of single samples, which cancel each other: advantages
    of a group, whose sum is 0, leave nothing but rounding of a loss that they weight."""
    bounds = compute_bounds(count, count // least, least)
    parts = split_batch(dict(some), count, count // least, unsplit_inputs, least)
    largest, rounding = 0.0, 0.0
    try:
        with torch.no_grad():
            for part, (start, stop) in list(zip(parts, bounds, strict=True))[:_SINGLE]:
                output, loss, _ = run(part, stop - start, is_differentiated=False)
                if float(loss.count):
                    largest = max(largest, abs(float(loss.sum) / float(loss.count)))
                numbers = [each.dtype for each in tensors_of(output) if each.is_floating_point()]
                rounding = max(rounding, *(2 * torch.finfo(each).eps for each in numbers), _find_rounding(loss))
    except Exception as error:
        _log.info("single samples were not looked at: %s: %s", type(error).__name__, error)
        return False
    return max(map(abs, losses)) < _CANCELLED * largest and abs(losses[0] - losses[1]) <= rounding * largest


def _find_rounding(loss: LossPart) -> float:
    """Return by how much, relative, sums in another order may differ."""
    return min(64 * torch.finfo(loss.sum.dtype).eps, _REPEATED) if loss.sum.is_floating_point() else 0.0


def _is_repeated(
    again: Ran, at_once: LossPart, slope: Gradients, combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> bool:
    # Where a last layer begins with zeros, only gradients show that numbers are drawn in front of it.
    slopes = _compare_gradients(at_once, slope, [again], combine)
    return _are_repeated(again[1], at_once) and not slopes.apart > slopes.allowed / 10


def _are_repeated(one: LossPart, other: LossPart) -> bool:
    """Tell whether two losses of the same differ by no more than the order of sums, which may be another one each time
    on a GPU."""
    first, second = float(one.sum.detach()), float(other.sum.detach())
    return abs(first - second) <= _find_rounding(one) * max(abs(first), abs(second))


def differentiate(part: LossPart, sources: Sequence[torch.Tensor]) -> Gradients:
    """The gradients of a loss; none where it has none, or where they cannot be taken in evaluation, as by cuDNN."""
    if not part.sum.requires_grad or not sources:
        return []
    try:
        return list(torch.autograd.grad(part.sum, sources, allow_unused=True))
    except RuntimeError as error:
        _log.info("gradients of samples were not compared: %s", error)
        return []


class _GradientDifference(NamedTuple):
    """The distance of gradients, and that to which rounding may bring them, relative to the norm of all; 0 where there
    are none."""

    apart: float = 0.0
    allowed: float = 0.0
    are_same: bool = False  # those of each tensor, relative to its own norm


def _compare_gradients(
    at_once: LossPart,
    slope: Gradients,
    made: Sequence[Ran],
    combine: Callable[[Sequence[torch.Tensor]], torch.Tensor],
) -> _GradientDifference:
    """Compare the gradients of the mean loss with those of the parts' mean."""
    total = sum(float(part.count) for _, part, _ in made)
    if not total or not float(at_once.count) or any(len(each) != len(slope) for _, _, each in made):
        return _GradientDifference()
    compared, are_known = list[tuple[float, float, float]](), True
    for one, *parts in zip(slope, *(each for _, _, each in made), strict=True):
        given = [each for each in parts if each is not None]  # None of an expert without words
        if one is None or not given:
            are_known = are_known and one is None and not given
            continue
        wanted, found = one / float(at_once.count), combine(given) / total
        if wanted.shape != found.shape:
            are_known = False
            continue
        apart, norm = (float(each.abs().double().square().sum()) for each in (wanted - found, wanted))
        compared.append((apart, norm, _OF_GRADIENTS.get(one.dtype, _OF_NARROW)))
    apart, norm = (math.fsum(each[place] for each in compared) for place in (0, 1))
    if not norm:
        return _GradientDifference()
    # A part of a loss that learns little is seen in the gradients of what it alone trains.
    are_same = all(each <= (of / 10) ** 2 * own + (of / 1e4) ** 2 * norm for each, own, of in compared)
    return _GradientDifference(math.sqrt(apart / norm), max(of for *_, of in compared), are_known and are_same)


def vary_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Change tensors a little, each in its own way."""
    torch.manual_seed(2)
    with torch.no_grad():
        for each in tensors:
            numbers = each.abs().double().nan_to_num(0.0, 0.0, 0.0)
            size = float(numbers.square().mean().sqrt()) if each.numel() else 0.0
            each.add_(torch.randn_like(each) * (0.1 * (size or 0.1)))


def fill_small(weights: Sequence[torch.Tensor]) -> bool:
    """Fill matrices that are zeros or small, as a last layer begins with, with random numbers; tell whether there were
    any."""
    found = [each for each in weights if each.dim() > 1 and each.numel() and _find_size(each) < _SMALL]
    torch.manual_seed(3)
    with torch.no_grad():
        for each in found:
            each.copy_(torch.randn_like(each) * each[0].numel() ** -0.5)
    return bool(found)


def _find_size(weight: torch.Tensor) -> float:
    """Return how large a matrix is beside one that keeps the size of what it is given."""
    size: float = weight.detach().abs().double().square().mean().sqrt().item() * weight[0].numel() ** 0.5
    return size


def look_again(
    apart: SampleDifference,
    compute: Callable[[], Ran],
    vary: Callable[[], None],
    compare: Callable[[], SampleDifference | None],
) -> SampleDifference | None:
    """Tell a difference from one of rounding, as where a model is compared with a copy of itself.

    Args:
        apart: The difference.
        compute: Gives the gradients of some samples.
        vary: Changes what the loss is computed of by a little.
        compare: Looks for a difference, which is what counts if gradients were nothing beside those after the change.

    Returns:
        The difference, if it is one.
    """
    try:
        here = compute()
        vary()
        return compare() if _is_rounding(here, compute()) else apart
    except Exception as error:
        _log.info("the difference was not looked at again: %s: %s", type(error).__name__, error)
        return apart


def _is_rounding(here: Ran, there: Ran) -> bool:
    """Tell whether gradients are nothing beside others. Losses would not do: where one is the difference of two that
    are alike, its rounding is that of those two."""
    kinds = {here[1].sum.dtype, *(each.dtype for each in here[2] if each is not None)}
    rounding = min(1e3 * max((torch.finfo(each).eps for each in kinds if each.is_floating_point), default=0.0), 1e-3)
    one, other = _find_norm(here[2]), _find_norm(there[2])
    return math.isfinite(float(there[1].sum.detach())) and math.isfinite(other) and one < rounding * other


def _find_norm(gradients: Gradients) -> float:
    return math.sqrt(math.fsum(float(each.abs().double().square().sum()) for each in gradients if each is not None))


def add_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)


def join_samples(one: Any, other: Any) -> Any:
    """Two values at once; None if tensors in them differ in more than their samples. Those without dimensions are of no
    sample."""
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=False))
    if len(pairs) != len(tensors_of(other)) or any(
        each.shape[1:] != more.shape[1:] or each.dim() != more.dim() or not (each.dim() or torch.equal(each, more))
        for each, more in pairs
    ):
        return None
    joined = iter([torch.cat(pair) if pair[0].dim() else pair[0] for pair in pairs])
    return map_tensors(other, lambda _: next(joined))


def join_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts))


def take_samples(given: Any, samples: int, count: int) -> Any:
    """The first of some samples."""
    return map_tensors(given, lambda tensor: tensor[:count] if tensor.dim() and len(tensor) == samples else tensor)


def are_alike(tensor: torch.Tensor) -> bool:
    """Tell whether numbers of samples, of which there are any, are the same of each."""
    is_known = tensor.is_floating_point() and tensor.layout is torch.strided and tensor.dim() and tensor.numel()
    return bool(is_known) and torch.equal(tensor, tensor[:1].expand_as(tensor))


def _compare_rows(output: Any, halves: Sequence[Any], count: int) -> tuple[bool, bool]:
    """Tell whether a model returns something beside what it makes of each sample, and whether that of the halves is
    what it made of the samples at once."""
    ones, others = tensors_of(output), [tensors_of(half) for half in halves]
    if any(len(each) != len(ones) for each in others):
        return True, False
    has_numbers, alike = False, True
    for one, *parts in zip(ones, *others, strict=True):
        # Also of several rows of each sample, as what a router says of each word.
        if one.dim() and len(one) % count == 0 and _are_rows(one, parts):
            alike = alike and _are_equal(one, torch.cat(parts))
        else:
            has_numbers, alike = True, alike and not one.dim()
    return has_numbers, alike


def _are_rows(one: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Tell whether parts together have the rows of a tensor."""
    return all(part.dim() and part.shape[1:] == one.shape[1:] for part in parts) and sum(map(len, parts)) == len(one)


def _differ_in_rows(output: Any, halves: Sequence[Any], count: int) -> bool:
    """Tell whether a model makes another thing of a sample where there are more."""
    for one, *parts in zip(tensors_of(output), *map(tensors_of, halves), strict=False):
        if one.dim() and len(one) == count and _are_rows(one, parts) and not _are_equal(one, torch.cat(parts)):
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
    if math.isfinite(one) and not math.isfinite(two):
        return one, two, math.inf  # as the mean of a part in which nothing counts
    return one, two, abs(one - two) / max([*(abs(sum_ / of) for sum_, of in parts if of), 1e-12])
