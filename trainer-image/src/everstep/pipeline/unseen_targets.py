"""Samples whose targets are beyond all of which a loss was compared: the first of a rare class, or the first with
padding, a mask or a weight of its own.

The example may have none of them, and then nothing shows that a mean is one over classes or weights. So the samples
whose targets differ most are taken from each batch that goes beyond those before, and again from the batches 1, 2, 4, 8
and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from everstep.pipeline.engine.nested import map_tensors, tensors_of

_EVERY = 64  # batches; targets on a GPU are waited for
_MOST = 16  # batches that are looked at until all are new again, as where targets grow with time
_NUMBERS = 4096  # of each sample and tensor
_LARGEST = 2**27  # numbers of a sample's output: a look takes several copies of two of them, also on a GPU
_NOTHING = (0, -1, -100)  # what most often stands for a target that does not count
_FIRST = -1  # in the place of a row


@dataclass(frozen=True)
class SamplePair:
    """Outputs and targets of two samples. `are_cut`: for each tensor of both, whether it has a row for each sample;
    None if all have."""

    outputs: Any
    targets: Any
    are_cut: tuple[bool, ...] | None = None

    def copy_rows(self, rows: slice) -> tuple[Any, Any]:
        """Copy what belongs to some of the samples."""
        cut = iter(self.are_cut or ())
        both: tuple[Any, Any] = map_tensors(
            (self.outputs, self.targets), lambda each: (each[rows] if next(cut, True) else each).clone()
        )
        return both

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> SamplePair:
        """Return the pair with other numbers."""
        return replace(self, outputs=map_tensors(self.outputs, change), targets=map_tensors(self.targets, change))


class _Measured(NamedTuple):
    """One measure of the targets of samples: the lowest and the highest value, each with the row that has it."""

    place: int
    low: tuple[float, int]
    high: tuple[float, int]


class UnseenTargets:
    """The sums of the targets of samples, and how many of their numbers may count or are none, as far as a loss was
    compared."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}
        self._batches, self._looks = 0, 0
        self._first: list[torch.Tensor] = []  # of a sample of the first micro-batch: those of another may be alike
        self.are_new = False

    def see(self, targets: Any) -> None:
        """See the targets of a batch, to tell by `are_new` whether its micro-batches are to be looked at."""
        self._batches, self._first = self._batches + 1, []
        if not self._batches & (self._batches - 1):
            self._seen, self._looks = {}, 0
        is_waited_for = any(each.device.type != "cpu" for each in tensors_of(targets))
        is_due = self._looks < _MOST and not (is_waited_for and self._seen and self._batches % _EVERY)
        self.are_new = is_due and any(map(self._is_beyond, _measure(targets, _count_samples(targets))))
        self._looks += self.are_new

    def take_pairs(self, output: Any, targets: Any) -> Iterator[tuple[SamplePair, list[Callable[[], SamplePair]]]]:
        """Copy pairs of samples, one of them of this micro-batch at least, as different as can be in what is new, which
        then is not new any more.

        Yields:
            A pair; and what makes the same with all that the model returns, but for one tensor, for both samples
            together, as it may be of no samples. None of them if there is no other tensor with a row for each.
        """
        samples, tensors = _count_samples(targets), tensors_of((output, targets))
        are_cut = [bool(each.dim()) and len(each) == samples for each in tensors]
        outputs = len(tensors_of(output))
        sizes = [each.numel() * is_cut for each, is_cut in zip(tensors[:outputs], are_cut, strict=False)]
        if not any(sizes) or max(sizes) > _LARGEST * samples:
            return
        first, known = self._first, dict[int, float]()
        if not first:
            self._first = [
                each.detach()[:1].clone() if is_cut else each for each, is_cut in zip(tensors, are_cut, strict=True)
            ]
        elif all(
            each.shape[1:] == own.shape[1:] and own.dim()
            for each, own, is_cut in zip(tensors, first, are_cut, strict=False)
            if is_cut
        ):
            known = {measured.place: measured.low[0] for measured in _measure(first[outputs:], 1)}
        cut = sorted((place for place, size in enumerate(sizes) if size), key=lambda place: -sizes[place])
        of_one = [
            [is_cut and place in (one, *range(outputs, len(tensors))) for place, is_cut in enumerate(are_cut)]
            for one in (cut if len(cut) > 1 else ())
        ]
        for place, *ends in _measure(targets, samples):
            ends += [(known[place], _FIRST)] if place in known else []
            low, high = min(ends), max(ends)
            if self._is_beyond(_Measured(place, low, high)):
                before = self._seen.get(place, (math.inf, -math.inf))
                self._seen[place] = min(low[0], before[0]), max(high[0], before[1])
                rows = low[1], high[1]
                make = partial(_make_pair, output, targets, first, rows)
                yield make(are_cut), [partial(make, each) for each in of_one]

    def forget(self) -> None:
        """Take what was seen for new, since the losses of it showed nothing."""
        self._seen = {}

    def _is_beyond(self, measured: _Measured) -> bool:
        low, high, before = measured.low[0], measured.high[0], self._seen.get(measured.place)
        return low < high and (before is None or low < before[0] or high > before[1])


def _count_samples(targets: Any) -> int:
    return next((len(each) for each in tensors_of(targets) if each.dim()), 0)


def _measure(targets: Any, samples: int) -> Iterator[_Measured]:
    for number, tensor in enumerate(tensors_of(targets)):
        is_plain = tensor.dim() and tensor.layout is torch.strided and not tensor.is_complex() and tensor.numel()
        if not is_plain or len(tensor) != samples:
            continue
        rows = tensor.detach().reshape(samples, -1)
        rows = rows[:, :: max(1, rows.shape[1] // _NUMBERS)].to(torch.float64)
        counts = ~torch.isin(rows, torch.tensor(_NOTHING, dtype=rows.dtype, device=rows.device))
        measures = rows.nan_to_num(0.0, 0.0, 0.0).sum(1), counts.sum(1), rows.isnan().sum(1)
        for place, each in enumerate(measures):
            values = list(zip(each.tolist(), range(samples), strict=True))
            yield _Measured(len(measures) * number + place, min(values), max(values))


def _make_pair(
    output: Any, targets: Any, first: Sequence[torch.Tensor], rows: Sequence[int], are_cut: Sequence[bool]
) -> SamplePair:
    places = iter(range(len(are_cut)))

    def take(tensor: torch.Tensor) -> torch.Tensor:
        place, own = next(places), tensor.detach()
        if not are_cut[place]:
            return own.clone()
        return torch.cat([first[place] if row == _FIRST else own[row : row + 1] for row in rows])

    return SamplePair(map_tensors(output, take), map_tensors(targets, take), tuple(are_cut))


def shrink_numbers(tensors: Sequence[torch.Tensor]) -> None:
    """Take from a half to all of each number, in place: probabilities and their logarithms stay such."""
    for number, each in enumerate(tensors):
        if each.is_floating_point():
            generator = torch.Generator("cpu").manual_seed(number)
            each.mul_((torch.rand(each.shape, generator=generator, device="cpu") / 2 + 0.5).to(each))


def vary_within_bounds(row: torch.Tensor) -> None:
    """Change each number of a row in place, also where all are 0; probabilities stay such."""
    zeros = row == 0
    shrink_numbers([row])
    row.add_(zeros * torch.arange(float(row.numel()), device=row.device).cos().abs().view_as(row))
