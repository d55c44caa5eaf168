"""A row whose result carries the interval of its ratio."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from benchmarks.measure import Row

REPEATS = 7

_RESAMPLES = 2000


@dataclass
class Interval(Row):
    """Adds a 95 % interval of the ratio (or value) of medians, by resampling; other samples are kept beside."""

    def as_json(self) -> dict[str, object]:
        return {**super().as_json(), "interval": self.interval()}

    def interval(self) -> tuple[float, float]:
        """Where the ratio would be in 95 of 100 such runs."""
        source = random.Random(0)
        ours, floor = self.samples["ours"], self.samples.get("floor", [])
        ratios = sorted(
            statistics.median(source.choices(ours, k=len(ours)))
            / (1.0 if self.absolute else statistics.median(source.choices(floor, k=len(floor))))
            for _ in range(_RESAMPLES)
        )
        return ratios[_RESAMPLES // 40], ratios[-_RESAMPLES // 40]
