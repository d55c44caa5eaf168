"""A row that holds its target when the interval of its ratio does."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from benchmarks.measure import Row

REPEATS = 7

_RESAMPLES = 2000


@dataclass
class Interval(Row):
    """A row with a 95 % interval of its ratio (or value), whose target holds when the interval does.

    The interval is found by resampling rounds. Where each round measured both arms, the row is paired: its ratio is the
    median of the ratios of its rounds, so what slows one round down on a busy machine, and with it both arms, is in
    neither the ratio nor its interval.
    """

    @property
    def paired(self) -> bool:
        return not self.absolute and len(self.samples["ours"]) == len(self.samples.get("floor", []))

    @property
    def ratio(self) -> float:
        return statistics.median(self._ratios()) if self.paired else super().ratio

    @property
    def passed(self) -> bool:
        return self._holds(self.interval()[1])

    def as_json(self) -> dict[str, object]:
        return {**super().as_json(), "interval": self.interval()}

    def interval(self) -> tuple[float, float]:
        """Return between what the ratio would be in 95 of 100 such runs."""
        source = random.Random(0)
        measured = self._ratios() if self.paired else self.samples["ours"]
        floor = self.samples.get("floor", []) if not self.paired and not self.absolute else []
        found = []
        for _ in range(_RESAMPLES):
            over = statistics.median(source.choices(floor, k=len(floor))) if floor else 1.0
            found.append(statistics.median(source.choices(measured, k=len(measured))) / over)
        found.sort()
        return found[_RESAMPLES // 40], found[-_RESAMPLES // 40]

    def _ratios(self) -> list[float]:
        return [ours / floor for ours, floor in zip(self.samples["ours"], self.samples["floor"], strict=True)]
