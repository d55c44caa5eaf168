"""A pod that was told to stop while ranks train: they save first, then they are stopped.

Where a TERM is the only notice (a drain, the shutdown of a node, a spot machine without a handler), nobody has asked
for a checkpoint beforehand. Only ranks whose checkpoint library has spoken are waited for; others get their TERM, and
its whole grace, at once.
"""

from __future__ import annotations

from everstep.agent.ranks.failure_causes import GenerationFailure


class Departure:
    """The first pod of a generation that is about to leave. Times are the leader's monotonic seconds."""

    def __init__(self) -> None:
        self._failure: GenerationFailure | None = None
        self._until = 0.0

    def restart(self) -> None:
        """Begin a new generation, which nobody leaves yet."""
        self._failure = None

    def begin(self, failure: GenerationFailure, until: float) -> None:
        """Note that a pod leaves. One that leaves later may have to be gone sooner.

        Args:
            failure: What ends the generation.
            until: When the ranks must be stopped at the latest.
        """
        self._until = until if self._failure is None else min(until, self._until)
        self._failure = self._failure or failure

    @property
    def due(self) -> float | None:
        """Return when the ranks must be stopped; None where nobody leaves."""
        return None if self._failure is None else self._until

    def find_failure(self, now: float, *, saved: bool) -> GenerationFailure | None:
        """Return what ends the generation, once its ranks need not, or cannot, be waited for any longer."""
        return self._failure if saved or now >= self._until else None
