"""Decide when a save is due: after a time, after so many steps, or when lost work costs what a save does (Young, Daly).

Pure: the caller passes the time. Seconds unless said otherwise.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)

# With nothing known, a failure a day: what a few nodes of spot capacity see.
PRIOR = 86400.0


def parse_duration(text: str | float) -> float:
    """Return the seconds of "90s", "10m", "1h30m" or a number. ValueError."""
    if isinstance(text, int | float):
        seconds = float(text)
    else:
        found = _DURATION.findall(text)
        if not found or "".join(number + unit for number, unit in found) != text:
            raise ValueError(f"not a duration: {text!r}; write it as 90s, 10m or 1h30m")
        seconds = sum(float(number) * _UNITS[unit] for number, unit in found)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"not a duration: {text!r}")
    return seconds


def compute_optimal_interval(cost: float, between_failures: float) -> float:
    """Return the interval at which the work lost by failures and the cost of saves are least together.

    `cost`: what one save takes from training; `between_failures`: the mean time. Daly, "A higher order estimate of the
    optimum checkpoint interval for restart dumps", FGCS 22 (2006), equation 37; its first term is Young's (1974).
    """
    if cost >= 2 * between_failures:
        return between_failures
    ratio = cost / (2 * between_failures)
    return math.sqrt(2 * cost * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def estimate_mean_time_between_failures(failures: int, observed: float, prior: float = PRIOR) -> float:
    """Return the mean time between failures, after so many in `observed` seconds; the prior counts as one failure."""
    return (prior + observed) / (1 + failures)


@dataclass
class Trigger:
    """The condition on which a save is due: any of `every` seconds, `every_steps`, or `auto`.

    With none of them, saves are taken on request only.
    """

    every: float | None = None
    every_steps: int | None = None
    auto: bool = False
    between_failures: float = PRIOR
    cost: float | None = None  # measured: seconds that one save takes from training
    duration: float = 0.0  # measured: seconds until one is in the store
    _since: float = field(default=math.nan, init=False)
    _steps_since: int = field(default=0, init=False)

    @classmethod
    def parse(
        cls, every: str | float | Literal["auto"] | None, every_steps: int | None, between_failures: float | None
    ) -> Trigger:
        """Return the trigger that a script's arguments describe.

        Raises:
            ValueError: An argument is not valid.
        """
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps is at least 1, not {every_steps}")
        mean = PRIOR if between_failures is None else between_failures
        if every == "auto":
            return cls(None, every_steps, auto=True, between_failures=mean)
        return cls(None if every is None else parse_duration(every), every_steps, between_failures=mean)

    @property
    def interval(self) -> float | None:
        """Return the seconds between two saves by time; None when time alone makes none due."""
        if not self.auto:
            return self.every
        if self.cost is None:
            return 0.0  # the first save measures what one costs
        # More often than the store takes them they cannot be had.
        return max(compute_optimal_interval(self.cost, self.between_failures), 1.5 * self.duration, 1.0)

    def start(self, step: int, now: float) -> None:
        """Begin to count: training begins, or a save was just begun."""
        self._since = now
        self._steps_since = step

    def due(self, step: int, now: float) -> bool:
        """Tell whether a save is to be taken at this step."""
        if math.isnan(self._since):
            self.start(step - 1, now)
        self._steps_since = min(self._steps_since, step - 1)  # after steps that went back, or one that was void
        interval = self.interval
        if interval is not None and now - self._since >= interval:
            return True
        return self.every_steps is not None and step // self.every_steps > self._steps_since // self.every_steps

    def limit(self, step: int) -> int | None:
        """Return the first step after this one that must not be passed without asking whether a save is due."""
        return None if self.every_steps is None else (step // self.every_steps + 1) * self.every_steps
