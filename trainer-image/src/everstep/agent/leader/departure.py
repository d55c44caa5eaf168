"""A pod that was told to stop while ranks train: they save first, then they are stopped.

Where a TERM is the only notice (a drain, the shutdown of a node, a spot machine without a handler), nobody has asked
for a checkpoint beforehand. Only ranks whose checkpoint library has spoken are waited for; others get their TERM, and
its whole grace, at once.
"""

from __future__ import annotations

from everstep.agent.ranks.failure_causes import GenerationFailure
from everstep.agent.wire.checkpoint_request import CheckpointRequest, compute_save_seconds
from everstep.agent.wire.protocol import APPLICATION, POD_LOST

from .pending_checkpoint import PendingCheckpoint


class Departure:
    """The first pod of a generation that is about to leave. Times are the leader's monotonic seconds."""

    def __init__(self, notice: PendingCheckpoint) -> None:
        """Begin with nobody who leaves.

        Args:
            notice: The operator's request, as for a node that was announced to go.
        """
        self._notice = notice
        self.restart()

    def restart(self) -> None:
        """Begin a new generation, which nobody leaves yet."""
        self.failure: GenerationFailure | None = None  # what ends the generation
        self._until = 0.0
        # Not the operator's, which the operator repeats until the leader's state tells of it.
        self.requests = (self._notice, PendingCheckpoint())

    def begin(
        self, now: float, failure: GenerationFailure, grace: float, order: tuple[int, int], trained: int | None
    ) -> None:
        """Note that a pod leaves. One that leaves later may have to be gone sooner.

        Args:
            now: The leader's monotonic seconds.
            failure: What ends the generation.
            grace: Seconds until the pod's end.
            order: Epoch and generation of the ranks.
            trained: The last step of its ranks; None: not told yet.
        """
        asked = self._notice.find_seconds_left(now, order[1], trained)
        seconds = compute_save_seconds(grace if asked is None else min(grace, asked))
        self._until = now + seconds if self.failure is None else min(now + seconds, self._until)
        self.failure = self.failure or failure
        if asked is None:
            self.requests[1].take(now, CheckpointRequest(f"leaving-{order[0]}.{order[1]}", seconds))

    def holds_training(self, now: float, generation: int) -> bool:
        """Return whether ranks of this generation may wait after a save, until they are told to stop."""
        return any(each.holds_training(now, generation) for each in self.requests)

    def explain_failure(self, failure: GenerationFailure) -> GenerationFailure | None:
        """Return what a failure follows from, if that is most likely the pod that was about to leave: its kubelet had
        less patience than its grace said, and its peers lost their connections. None: it is a failure of its own.

        Args:
            failure: What befell the ranks meanwhile.
        """
        taken = failure.echo or failure.termed or failure.killed
        return self.failure if failure.cause == POD_LOST or (failure.cause == APPLICATION and taken) else None

    @property
    def due(self) -> float | None:
        """Return when the ranks must be stopped; None where nobody leaves."""
        return None if self.failure is None else self._until

    def find_failure(self, now: float, generation: int, trained: int | None) -> GenerationFailure | None:
        """Return what ends the generation, once its ranks need not, or cannot, be waited for any longer.

        Args:
            now: The leader's monotonic seconds.
            generation: The generation that runs.
            trained: The last step of its ranks; None: not told yet.
        """
        saved = any(each.has_saved(now, generation, trained) for each in self.requests)
        return self.failure if saved or now >= self._until else None
