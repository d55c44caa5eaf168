"""The newest request for a checkpoint: which generation has had it, and which checkpoint was saved for it."""

from __future__ import annotations

from typing import Any

from everstep.agent.wire.checkpoint_request import CheckpointRequest


class PendingCheckpoint:
    """The request as the leader keeps it. Times are the leader's monotonic seconds."""

    def __init__(self) -> None:
        self._request: CheckpointRequest | None = None
        self._until: float | None = None
        self._told = 0  # the generation that has had it
        self._from_step = 0  # a checkpoint of this step or later was saved for it
        self._is_counted = False  # that step is counted as checkpoints are
        self._saved_step: int | None = None
        self._newest_step: int | None = None  # of all that were saved since: ranks may save by themselves, too

    def take(self, now: float, request: CheckpointRequest) -> bool:
        """Take in a request. Return False if it is the one that is known already."""
        if self._request is not None and self._request.id == request.id:
            return False
        self._request, self._told, self._saved_step, self._newest_step = request, 0, None, None
        self._until = None if request.seconds is None else now + request.seconds
        return True

    def find_untold(
        self, now: float, generation: int, trained: int | None, saved: int | None, counted: int | None
    ) -> CheckpointRequest | None:
        """Return the request if the ranks of this generation are to have it, which then counts as done.

        What an earlier generation has had is asked for again only before its deadline: that generation may have ended
        before it could save.

        Args:
            now: The leader's monotonic seconds.
            generation: The generation that runs.
            trained: The last step of its ranks: what was saved before is not what is asked for. None: not told yet.
            saved: The step of the newest checkpoint, if there is one.
            counted: The last step, counted as checkpoints are; None: not told yet, and `trained` may count otherwise.
        """
        request = self._request
        if request is None or self._told == generation or self._saved_step is not None:
            return None
        if self._until is None and self._told:
            return None
        left = None if self._until is None else self._until - now
        if left is not None and left <= 0:
            return None
        self._told, self._newest_step = generation, None
        # What is saved already is none of what is asked for, whatever the progress of ranks counts.
        least = max(trained or 0, 0 if saved is None else saved + 1)
        self._from_step = least if counted is None else counted
        self._is_counted = counted is not None
        return CheckpointRequest(request.id, left)

    def holds_training(self, now: float, generation: int) -> bool:
        """Return whether ranks of this generation may wait after their save, until they are told to stop."""
        return self._told == generation and self._until is not None and now < self._until

    def find_seconds_left(self, now: float, generation: int, trained: int | None) -> float | None:
        """Return the seconds to the deadline of a request for which the ranks of this generation save, or have saved
        and wait since then; None where there is none, or they went on.

        Args:
            now: The leader's monotonic seconds.
            generation: The generation that runs.
            trained: The last step of its ranks; None: not told yet.
        """
        if self._request is None or self._until is None or self._told not in (0, generation) or now >= self._until:
            return None
        return None if self._is_behind(trained) else self._until - now

    def has_saved(self, now: float, generation: int, trained: int | None) -> bool:
        """Return whether the ranks of this generation have saved for their request, and wait since then.

        Args:
            now: The leader's monotonic seconds.
            generation: The generation that runs.
            trained: The last step of its ranks; None: not told yet.
        """
        return self._saved_step is not None and self.holds_training(now, generation) and not self._is_behind(trained)

    def _is_behind(self, trained: int | None) -> bool:
        return self._newest_step is not None and trained is not None and trained > self._newest_step

    def note_checkpoint(self, generation: int, step: int | None, counted: int | None) -> bool:
        """Take in the step of the newest committed checkpoint. Return True if it is the one that was asked for.

        Args:
            generation: The generation that runs.
            step: That step, if there is one.
            counted: The last step that was trained, counted as checkpoints are; None: not told yet.
        """
        if self._told == generation and counted is not None and not self._is_counted:
            self._from_step, self._is_counted = counted, True
        if self._told != generation or step is None or step < self._from_step:
            return False
        self._newest_step = step
        if self._saved_step is not None:
            return False
        self._saved_step = step
        return True

    def to_json(self) -> dict[str, Any] | None:
        """Return the request as the leader's state tells of it."""
        if self._request is None:
            return None
        return {"id": self._request.id, "generation": self._told, "savedStep": self._saved_step}
