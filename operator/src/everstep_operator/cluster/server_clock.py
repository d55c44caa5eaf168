"""The time of day, as the API server has it.

Ages and limits of jobs are measured from times that the API server and former operators wrote. This machine's clock may
be a day off, or be set while we run, so it is not asked: each answer of the API server carries a `Date` (RFC 9110,
6.6.1), and between two of them a clock counts that nobody can set.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

import structlog

from everstep.agent.system.clock import read_boottime

log = structlog.get_logger(__name__)

JUMP_SECONDS = 5.0  # more than clocks of several API servers, or a clock that is slowly corrected, differ by
CONFIRM_SECONDS = 60.0  # so long every answer must tell of a jump before it is believed


class ServerClock:
    """Unix seconds of the API server.

    Args:
        steady: Seconds of a clock that nobody sets.
        wall: This machine's time of day, for as long as no answer has told a better one.
    """

    def __init__(
        self, steady: Callable[[], float] = read_boottime, wall: Callable[[], float] = lambda: time.time()
    ) -> None:
        self.steady = steady
        self._offset = wall() - steady()
        self._told = False
        self._doubted: tuple[float, float] | None = None  # since when, and by which offset

    def now(self) -> float:
        """Return the present time in Unix seconds."""
        return self.steady() + self._offset

    def observe(self, date: str, asked_at: float) -> None:
        """Learn from an answer. One that is no date is as if it had not been there.

        Args:
            date: The answer's `Date`: whole seconds, cut off.
            asked_at: When the request was sent, by the steady clock.
        """
        if (told := _parse_date(date)) is None:
            return
        received = self.steady()
        low, high = told - received, told + 1.0 - asked_at  # the offset lies between these
        nearest = _clamp_value(self._offset, low, high)
        if not self._told or abs(nearest - self._offset) <= JUMP_SECONDS:
            if not self._told and abs(nearest - self._offset) > JUMP_SECONDS:
                log.warning("this machine's clock is wrong, by the API server's", seconds=self._offset - nearest)
            self._offset, self._told, self._doubted = nearest, True, None
        elif self._doubted is None or abs(_clamp_value(self._doubted[1], low, high) - self._doubted[1]) > JUMP_SECONDS:
            log.warning("the API server's clock has jumped; not believed yet", seconds=nearest - self._offset)
            self._doubted = (received, nearest)
        elif received - self._doubted[0] >= CONFIRM_SECONDS:
            log.warning("the API server's clock stays where it has jumped to", seconds=nearest - self._offset)
            self._offset, self._doubted = nearest, None


@functools.lru_cache(maxsize=16)  # all answers of one second have the same
def _parse_date(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _clamp_value(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
