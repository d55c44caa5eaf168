"""Gives the processor time that leaders' answers cost out by namespace.

All of it is spent in one event loop, which also renews the Lease. An answer comes out of a pod that runs a user's code,
and is as dear as that user likes: a namespace that has spent more than its share waits until the share has made up
for it, whatever other namespaces do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

NAMESPACE_SHARE = 0.05  # of one core, for each namespace
BURST_SECONDS = 0.25  # that a namespace may be ahead of its share: all of its jobs may start at once
JOB_SHARE = 0.02  # of one core, for each job
PAUSE_MAX = 300.0  # seconds: what is owed beyond them is forgiven, or a day of debts would take hours to work off
FORGET_ABOVE = 1000  # namespaces


@dataclass
class ProcessorBudget:
    """Debts in seconds of processor time. `clock` is in seconds, and only its differences count."""

    clock: Callable[[], float]
    _debts: dict[str, tuple[float, float]] = field(default_factory=dict)  # by namespace: the debt, and at what time

    def charge(self, namespace: str, seconds: float) -> None:
        """Add what an answer has cost to the debt of its namespace."""
        now = self.clock()
        most = BURST_SECONDS + PAUSE_MAX * NAMESPACE_SHARE
        self._debts[namespace] = (min(most, self._debt(namespace, now) + seconds), now)
        if len(self._debts) > FORGET_ABOVE:
            self._debts = {name: entry for name, entry in self._debts.items() if self._debt(name, now) > 0}

    def pause(self, namespace: str, seconds: float) -> float:
        """Return for how many seconds to leave a job alone whose last answer has cost `seconds` of processor time."""
        ahead = self._debt(namespace, self.clock()) - BURST_SECONDS
        return min(PAUSE_MAX, max(seconds / JOB_SHARE, ahead / NAMESPACE_SHARE, 0.0))

    def _debt(self, namespace: str, now: float) -> float:
        debt, at = self._debts.get(namespace, (0.0, now))
        return max(0.0, debt - (now - at) * NAMESPACE_SHARE)
