"""The newest request for a checkpoint: which generation has had it, and whether the next one is to have it too."""

from __future__ import annotations

from typing import Any

from everstep.agent.wire.checkpoint_request import CheckpointRequest


class PendingCheckpoint:
    """The request as the leader keeps it. Times are the leader's monotonic seconds."""

    def __init__(self) -> None:
        self._request: CheckpointRequest | None = None
        self._until: float | None = None
        self._told = 0  # the generation that has had it

    def take(self, now: float, request: CheckpointRequest) -> bool:
        """Take in a request. Return False if it is the one that is known already."""
        if self._request is not None and self._request.id == request.id:
            return False
        self._request, self._told = request, 0
        self._until = None if request.seconds is None else now + request.seconds
        return True

    def find_untold(self, now: float, generation: int) -> CheckpointRequest | None:
        """Return the request if the ranks of this generation are to have it, which then counts as done.

        What an earlier generation has had is asked for again only before its deadline: that generation may have ended
        before it could save.
        """
        request = self._request
        if request is None or self._told == generation:
            return None
        if self._until is None and self._told:
            return None
        left = None if self._until is None else self._until - now
        if left is not None and left <= 0:
            return None
        self._told = generation
        return CheckpointRequest(request.id, left)

    def to_json(self) -> dict[str, Any] | None:
        """Return the request as the leader's state tells of it."""
        return {"id": self._request.id, "generation": self._told} if self._request is not None else None
