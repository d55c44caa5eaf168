"""Tells when a job hangs: no rank that reports steps has made one for too long, and none is in another phase.

Pure: the caller passes the time (monotonic seconds).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from everstep.agent.wire.protocol import RankProgress

DUMP_SECONDS = 2.0  # seconds for the ranks' stacks to reach the log before the ranks are stopped
TRAIN = "train"  # time in any other phase is no hang


@dataclass
class _RankStep:
    step: int
    since: float
    phase: str = TRAIN


class HangWatch:
    """A watch over the ranks of one generation. A rank counts from the first step that it reports."""

    def __init__(self, seconds: float) -> None:
        """Begin without ranks.

        Args:
            seconds: The time without a step that is a hang; 0 for no watch.
        """
        self._seconds = seconds
        self._ranks: dict[int, _RankStep] = {}
        self._dumped_at: float | None = None

    def restart(self) -> None:
        """Begin a new generation."""
        self._ranks.clear()
        self._dumped_at = None

    def update(self, now: float, ranks: Iterable[RankProgress]) -> None:
        """Take in what ranks say."""
        for rank in ranks:
            known = self._ranks.get(rank.rank)
            if known is None:
                if rank.step is not None:
                    self._ranks[rank.rank] = _RankStep(rank.step, now, rank.phase or TRAIN)
                continue
            phase = rank.phase or known.phase
            if rank.step not in (None, known.step) or phase != known.phase:
                known.since = now
            known.step, known.phase = known.step if rank.step is None else rank.step, phase

    def forget(self, rank: int) -> None:
        """Leave out a rank that has ended."""
        self._ranks.pop(rank, None)

    def pause(self, seconds: float) -> None:
        """Leave out a time in which this process stood still: it has heard of no step."""
        for rank in self._ranks.values():
            rank.since += seconds

    def excuse(self, now: float) -> None:
        """Begin to count anew: ranks have a reason to make no step now."""
        self._dumped_at = None
        for rank in self._ranks.values():
            rank.since = now

    def due(self) -> float | None:
        """Return when to look next, if no rank says anything before; None: not before one does."""
        since = self._find_last_step()
        if since is None:
            return None
        return since + self._seconds if self._dumped_at is None else self._dumped_at + DUMP_SECONDS

    def wants_dump(self, now: float) -> bool:
        """Return whether the job hangs and the stacks of its ranks are to be dumped; true once for each hang."""
        since = self._find_last_step()
        if since is None or now < since + self._seconds:
            self._dumped_at = None  # it goes on
            return False
        if self._dumped_at is not None:
            return False
        self._dumped_at = now
        return True

    def find_hang(self, now: float) -> tuple[int, str] | None:
        """Return the rank that is behind and a message about it, once the stacks had their time; None: no hang."""
        if self._dumped_at is None or now < self._dumped_at + DUMP_SECONDS:
            return None
        behind = min(self._ranks, key=lambda rank: (self._ranks[rank].step, rank))
        step, furthest = self._ranks[behind].step, max(each.step for each in self._ranks.values())
        alike = [rank for rank, each in self._ranks.items() if each.step == step]
        who = f"rank {behind} is at step {step}" if len(alike) < len(self._ranks) else f"all ranks are at step {step}"
        others = f", others at {furthest}" if furthest > step else ""
        return behind, f"no step for {self._seconds:g} s (timeouts.hang): {who}{others}; their stacks are in the log"

    def _find_last_step(self) -> float | None:
        if not self._seconds or not self._ranks or any(each.phase != TRAIN for each in self._ranks.values()):
            return None
        return max(each.since for each in self._ranks.values())
