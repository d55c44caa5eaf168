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
    """A row with a 95 % interval of its ratio (or value) of medians, whose target holds when the interval does.

    The interval is found by resampling rounds. Where each round measured both arms, it is paired: what slows one round
    down on a busy machine slows both arms down.
    """

    @property
    def passed(self) -> bool:
        return self._holds(self.interval()[1])

    def as_json(self) -> dict[str, object]:
        return {**super().as_json(), "interval": self.interval()}

    def interval(self) -> tuple[float, float]:
        """Return between what the ratio would be in 95 of 100 such runs."""
        source = random.Random(0)
        ours, floor = self.samples["ours"], self.samples.get("floor", [])
        found = []
        for _ in range(_RESAMPLES):
            rounds = source.choices(range(len(ours)), k=len(ours))
            others = rounds if len(floor) == len(ours) else source.choices(range(len(floor)), k=len(floor))
            over = 1.0 if self.absolute else statistics.median(floor[each] for each in others)
            found.append(statistics.median(ours[each] for each in rounds) / over)
        found.sort()
        return found[_RESAMPLES // 40], found[-_RESAMPLES // 40]
