"""Targets of which some samples count more than others, that come only after training has begun.

A loss that gives a bare mean is weighted by samples. Where it is a mean over words or pixels that count, this shows
only if samples differ in how many of theirs count, which the example may not. So the first batch in which they do, by
-100 or by a mask, has the loss looked at once more; and so has each whose targets are beyond those before.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from everstep.pipeline.engine.losses import Loss, compute_loss
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.compiled import disable_compilation
from everstep.pipeline.frontend.foreign_weights import WeightReads
from everstep.pipeline.frontend.script_draws import ScriptDraws
from everstep.pipeline.loss_state import loss_kept
from everstep.pipeline.unseen_targets import SamplePair, UnseenTargets, shrink_numbers, vary_within_bounds

_log = logging.getLogger("everstep.pipeline")

_IGNORED = -100  # by all losses of torch, unless they are told another number
_EVERY = 64  # batches; targets on a GPU are waited for
_TRIES = 16  # micro-batches whose losses show nothing, as those in which no target counts
_OF_NUMBERS, _OF_NARROW = 1e-4, 5e-2  # relative to the largest of the losses
_ADVICE = (
    "give EngineOptions.loss_weight, a function of (output, targets) that returns how many count, or let the loss "
    "return (sum, count)"
)


class _Compared(NamedTuple):
    """The losses of two samples: at once, the mean of both, and whether they are apart; and whether those of the
    samples are, without which nothing shows."""

    at_once: float
    mean: float
    is_apart: bool
    shows: bool


class _NarrowReads(WeightReads):
    """Knows as well whether something inside was computed in a narrow type, as by a network in a loss that has an
    autocast of its own: its rounding is not that of the loss's type."""

    are_narrow = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and note the type of its result."""
        given = super().__torch_function__(func, types, args, kwargs)
        if isinstance(given, torch.Tensor) and given.is_floating_point() and given.itemsize < 4:
            self.are_narrow = True
        return given


class CountedTargets:
    """A loss that is looked at once more where samples differ in how much of their targets counts, and where targets
    are beyond those before.

    Args:
        loss: The loss.
        weight: As `EngineOptions.loss_weight`.
        own: The script's loss, whose state and random numbers are left as they are; `loss` if it is None.

    Raises:
        PipelineError: It is a mean over what counts, and has no weight that says how much that is.
    """

    def __init__(self, loss: Loss, weight: Loss | None, own: Loss | None = None) -> None:
        self._loss, self._weight, self._own = loss, weight, loss if own is None else own
        self._is_weighted = weight is not None  # or gives (sum, count)
        self._is_done, self._looks, self._batches, self._tries = self._is_weighted, False, 0, 0
        self._uneven: list[bool] = []  # of each tensor of the targets, and of all parts of a batch that is cut already
        self._unseen = UnseenTargets()

    def see(self, targets: Any) -> None:
        """See the targets of a batch before its micro-batches are given to the loss."""
        if not self._is_done and not self._looks:
            self._batches += 1
            self._uneven = [self._is_uneven(each) for each in tensors_of(targets)]
            self._looks = any(self._uneven)
        if not self._is_weighted:
            self._unseen.see(targets)

    def __call__(self, output: Any, targets: Any) -> Any:
        unseen = self._unseen.are_new and not self._is_weighted
        looks, self._looks = self._looks, False
        error = pair = None
        try:
            error = self._look_at_unseen(output, targets) if unseen else None
            pair = _take_pair(output, targets) if looks else None  # before the loss, which may write what it is given
        except RuntimeError as why:  # no memory for copies, where there is just enough for training
            _log.info("whether the loss counts targets was not checked: %s: %s", type(why).__name__, why)
            self._tries += looks
            self._is_done, looks = self._is_done or self._tries == _TRIES, False
        given = self._loss(output, targets)  # may know more of why
        if error is not None:
            raise error
        if isinstance(given, tuple):
            self._is_done = self._is_weighted = True
        elif looks:
            self._tries += 1
            self._is_done = self._look(pair) or self._tries == _TRIES
            self._looks = not self._is_done  # at the next micro-batch
        return given

    def _is_uneven(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype not in (torch.int64, torch.int32, torch.bool) or not tensor.dim() or len(tensor) < 2:
            return False
        if tensor.device.type != "cpu" and self._batches % _EVERY != 1:
            return False
        counts = _find_ignored(tensor).reshape(len(tensor), -1).sum(1)
        return bool((counts != counts[0]).any())

    def _look(self, pair: tuple[Any, Any] | None) -> bool:
        """Compare the loss of two samples, of one of which half is ignored, with the mean of the losses of each; tell
        whether this shows anything."""
        if pair is None:
            warnings.warn(
                "samples of this batch differ in how much of their targets counts, and the loss gives a bare mean, "
                f"which a pipeline weights by samples: if it is a mean over what counts, {_ADVICE}",
                stacklevel=2,
            )
            return True
        # Losses are nearly alike before training; but not all outputs can be any number, nor all losses take any type.
        for is_wide, factor in ((True, 3.0), (True, 1.0), (False, 3.0), (False, 1.0)):
            try:
                found = self._compare(SamplePair(*_vary(pair, factor, self._uneven, is_wide=is_wide)), is_wide=is_wide)
            except Exception as error:
                _log.info("whether the loss counts targets was not checked: %s: %s", type(error).__name__, error)
                continue
            if found is None or not found.is_apart:
                return True
            raise PipelineError(
                f"the loss of two samples, of which one counts less, is {found.at_once:.6g} at once, and the mean of "
                f"their losses is {found.mean:.6g}: it is a mean over what counts in the targets, of which samples of "
                f"this batch have different numbers, and a pipeline weights a bare mean by samples: {_ADVICE}"
            )
        return False

    def _look_at_unseen(self, output: Any, targets: Any) -> PipelineError | None:
        """Compare the losses of samples of this micro-batch, whose targets are as different as can be, at once with
        those of each; return what there is to tell."""
        shows = True
        for pair, others in self._unseen.take_pairs(output, targets):
            found = self._compare_as_it_is(pair)
            if self._is_weighted:
                return None
            if found is not None and found.is_apart:
                # Rounding, as between a model and its copy, is none of other numbers, and what the model returns beside
                # its samples, as the balance of each of its layers, is the same for all of them.
                shrunk = self._compare_as_it_is(pair, is_shrunk=True)
                if shrunk is not None and shrunk.is_apart and all(map(self._may_be_apart, others)):
                    return PipelineError(
                        f"the loss of two samples, whose targets differ more than those of batches before, is "
                        f"{found.at_once:.6g} at once, and the mean of their losses is {found.mean:.6g}: it is a mean "
                        "over what counts in the targets, by a mask, another number or weights of classes or samples, "
                        "or it takes samples together, and a pipeline cuts a batch and weights a bare mean by samples: "
                        f"{_ADVICE}; where samples are compared with each other, take microbatches=1 and one replica"
                    )
            shows = shows and found is not None and found.shows
        if not shows:
            self._unseen.forget()
        return None

    def _may_be_apart(self, make: Callable[[], SamplePair]) -> bool:
        found = self._compare_as_it_is(make())
        return found is None or found.is_apart

    def _compare_as_it_is(self, pair: SamplePair, *, is_shrunk: bool = False) -> _Compared | None:
        for is_wide in (True, False):
            try:
                own = pair.change(_widen if is_wide else torch.Tensor.clone)
                if is_shrunk:
                    shrink_numbers(tensors_of(own.outputs))
                return self._compare(own, is_wide=is_wide)
            except Exception as error:
                _log.info("whether the loss counts targets was not checked: %s: %s", type(error).__name__, error)
        return None

    def _compare(self, pair: SamplePair, *, is_wide: bool) -> _Compared | None:
        """Compare the loss of two samples at once with the mean of both; None if they differ for another reason."""
        tensors = tensors_of((pair.outputs, pair.targets))
        draws = ScriptDraws(self._own if isinstance(self._own, nn.Module) else nn.Module())
        before, kind, types, drew = draws.get_state(), tensors[0].device.type, {each.dtype for each in tensors}, False

        def compute(rows: slice, seed: int = 0) -> float:
            nonlocal drew
            torch.manual_seed(seed)
            with draws.at(before):
                given = compute_loss(self._see_kind, *pair.copy_rows(rows), 1, None).sum
                drew = drew or draws.have_drawn(before)
            types.add(given.dtype)
            return float(given)

        devices = {each.device.index or 0 for each in tensors if each.device.type == "cuda"}
        with (
            torch.no_grad(),
            torch.random.fork_rng(sorted(devices)),
            torch.autocast(kind, enabled=not is_wide and torch.is_autocast_enabled(kind)),
            loss_kept(self._own),
            disable_compilation(),
            _NarrowReads({}) as reads,
        ):
            both, again = compute(slice(0, 2)), compute(slice(0, 2), seed=1)
            one, other = compute(slice(0, 1)), compute(slice(1, 2))
        if not math.isfinite(both) or math.isinf(one) or math.isinf(other):
            raise ArithmeticError(f"it is {both:g}")
        if drew or reads.draws or both != again:
            return None
        narrow = not is_wide or reads.are_narrow or any(each.is_floating_point and each.itemsize < 4 for each in types)
        allowed = (_OF_NARROW if narrow else _OF_NUMBERS) * max(abs(both), abs(one), abs(other))
        is_apart, shows = not abs(both - (one + other) / 2) <= allowed, not abs(one - other) <= allowed
        return _Compared(both, (one + other) / 2, is_apart, shows)

    def _see_kind(self, output: Any, targets: Any) -> Any:
        given = self._loss(output, targets)
        self._is_weighted = self._is_weighted or isinstance(given, tuple)
        return given


def _take_pair(output: Any, targets: Any) -> tuple[Any, Any] | None:
    """Copy, twice each, the sample of which most counts; None if not all tensors are cut by samples."""
    tensors = [*tensors_of(output), *tensors_of(targets)]
    if any(not each.dim() or len(each) != len(tensors[0]) for each in tensors):
        return None
    counted = [each for each in tensors_of(targets) if each.dtype in (torch.int64, torch.int32, torch.bool)]
    ignored = [_find_ignored(each).reshape(len(each), -1).sum(1).cpu() for each in counted]
    fullest = int(torch.stack(ignored).sum(0).argmin())

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach()[fullest : fullest + 1]
        return torch.cat([own, own])

    return map_tensors(output, twice), map_tensors(targets, twice)


def _vary(pair: tuple[Any, Any], factor: float, uneven: Sequence[bool], *, is_wide: bool) -> tuple[Any, Any]:
    """Let the first sample have other outputs, and count half by those targets in which samples differ: a class beside
    a flag is none that is ignored. `is_wide` has all numbers in float32 at least."""
    outputs, wanted = map_tensors(pair, _widen if is_wide else torch.Tensor.clone)
    for each in tensors_of(outputs):
        if not each.is_floating_point() or factor == 1.0:
            continue
        if each.device.type != "cpu":
            # A kernel that asserts what its input may be, as of probabilities, ends all use of the device.
            vary_within_bounds(each[0])
        else:  # and not only larger: a last layer may begin with zeros
            each[0] = each[0] * factor + torch.arange(each[0].numel(), device="cpu").cos().view_as(each[0])
    every = tensors_of(wanted)
    for place, each in enumerate(every):
        if not any(uneven[place :: len(every)]):
            continue
        if each.dtype in (torch.int64, torch.int32):
            _ignore_half(each[0], _IGNORED)
        elif each.dtype is torch.bool:
            _ignore_half(each[0], False)
    return outputs, wanted


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    is_narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.float() if is_narrow else tensor.clone()


def _find_ignored(tensor: torch.Tensor) -> torch.Tensor:
    return ~tensor if tensor.dtype is torch.bool else tensor == _IGNORED


def _ignore_half(row: torch.Tensor, value: Any) -> None:
    """Let the first half of what counts in a row count no more, and all of it if that is one."""
    flat = row.view(-1)
    counting = (~_find_ignored(flat)).nonzero().flatten()
    flat[counting[: (len(counting) + 1) // 2]] = value
