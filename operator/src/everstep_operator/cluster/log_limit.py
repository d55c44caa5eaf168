"""Limits the lines about a failure that goes on: one a minute for each thing that fails, with the number left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

PERIOD_SECONDS = 60.0
FORGET_ABOVE = 1000  # keys


@dataclass
class LogRateLimiter:
    """Decides which lines are written. `clock` is in seconds, and only its differences count."""

    clock: Callable[[], float] = time.monotonic
    period: float = PERIOD_SECONDS
    _told: dict[Hashable, tuple[float, int]] = field(default_factory=dict)  # when last, and how many not since then

    def left_out(self, key: Hashable) -> int | None:
        """Ask for one line.

        Args:
            key: What has failed, and how.

        Returns:
            None if the line is to be left out; else the number of lines left out since the last one that was written.
        """
        now = self.clock()
        at, count = self._told.get(key, (float("-inf"), 0))
        if now < at + self.period:
            self._told[key] = (at, count + 1)
            return None
        self._told[key] = (now, 0)
        if len(self._told) > FORGET_ABOVE:
            self._told = {other: entry for other, entry in self._told.items() if now < entry[0] + self.period}
        return count
