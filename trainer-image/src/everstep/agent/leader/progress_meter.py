"""The job's progress as one number, out of what its ranks say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from everstep.agent.wire.protocol import RankProgress

from .step_rate import StepRate

PUBLISH_INTERVAL_SECONDS = 1.0  # seconds: progress alone wakes a waiting poll at most this often


class ProgressMeter:
    """A meter of the furthest rank, which stands for all since ranks train in step; metrics are those of the lowest
    rank that has any."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.total: int | None = None
        self.phase = ""
        self.metrics: dict[str, float] = {}
        self.changed_at: float | None = None  # not yet published
        self._at = 0.0  # time of day
        self._published_at = float("-inf")
        self._metrics_rank = -1
        self._phase_rank = -1
        self._fresh = True
        self._rate = StepRate()

    def restart(self) -> None:
        """Begin a new generation: its first step may lie behind the last one's, by as much as since the checkpoint."""
        self._rate.restart()
        self._metrics_rank = self._phase_rank = -1
        self._fresh = True

    @property
    def generation_step(self) -> int | None:
        """Return the last step of this generation; None when no rank has reported one."""
        return None if self._fresh else self.step

    def update(self, now: float, wall: float, ranks: Iterable[RankProgress]) -> None:
        for rank in ranks:
            self.changed_at = now if self.changed_at is None else self.changed_at
            self._at = wall
            if rank.step is not None and (self._fresh or self.step is None or rank.step > self.step):
                self.step, self._fresh = rank.step, False
                self._rate.note(now, rank.step)
            if rank.total is not None:
                self.total = rank.total
            if rank.phase and (self._phase_rank < 0 or rank.rank <= self._phase_rank):
                self.phase, self._phase_rank = rank.phase, rank.rank
            if rank.metrics and (self._metrics_rank < 0 or rank.rank <= self._metrics_rank):
                self.metrics, self._metrics_rank = dict(rank.metrics), rank.rank

    def due(self) -> float:
        return self._published_at + PUBLISH_INTERVAL_SECONDS

    def flush(self, now: float) -> bool:
        """Return True if there is something new to publish, and it is time."""
        if self.changed_at is None or now < self.due():
            return False
        self.changed_at, self._published_at = None, now
        return True

    def to_json(self) -> dict[str, Any] | None:
        if self._at == 0.0:
            return None
        return {
            "step": self.step,
            "totalSteps": self.total,
            "stepsPerSecond": self._rate.steps_per_second,
            "phase": self.phase,
            "metrics": self.metrics,
            "at": self._at,
        }
