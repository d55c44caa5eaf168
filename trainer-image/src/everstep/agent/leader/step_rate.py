"""The rate at which steps are made, over the last half minute."""

from __future__ import annotations

from collections import deque

RATE_WINDOW_SECONDS = 30.0  # seconds over which the rate is taken


class StepRate:
    """A meter of the steps of one generation."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def restart(self) -> None:
        """Begin a new generation: its first step may lie behind the last one's."""
        self._samples.clear()

    def note(self, now: float, step: int) -> None:
        """Take in a step that was made by now, in seconds of any clock."""
        if self._samples and now - self._samples[-1][0] < 0.1:
            self._samples[-1] = (self._samples[-1][0], step)
            return
        self._samples.append((now, step))
        while now - self._samples[0][0] > RATE_WINDOW_SECONDS and len(self._samples) > 2:
            self._samples.popleft()

    @property
    def steps_per_second(self) -> float | None:
        """Return the rate; None where it is not known yet."""
        if len(self._samples) < 2:
            return None
        (t0, s0), (t1, s1) = self._samples[0], self._samples[-1]
        return round((s1 - s0) / (t1 - t0), 4) if t1 > t0 else None
