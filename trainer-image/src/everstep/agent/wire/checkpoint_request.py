"""The request for a checkpoint, as the operator's command and as the leader's message carry it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .protocol import MAX_INTEGER

MAX_ID_CHARS = 64


class CheckpointRequest(NamedTuple):
    """A request that the ranks save at their next step boundary; two of one id are one request."""

    id: str
    seconds: float | None  # left for it; None: no hurry

    def to_message(self, generation: int) -> dict[str, Any]:
        """Return the leader's `checkpoint` message, the same for every node."""
        return {"type": "checkpoint", "generation": generation, "id": self.id, "seconds": self.seconds}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], seconds: str = "seconds") -> CheckpointRequest:
        """Read one from a message, or from the operator's command, where the time left is `deadline`.

        Raises:
            ValueError: The id is not 1 to 64 characters, or the time left no number of seconds.
        """
        name, left = data.get("id"), data.get(seconds)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS or not name.isprintable():
            raise ValueError(f"id must be 1 to {MAX_ID_CHARS} printable characters")
        if left is not None and not (
            isinstance(left, (int, float)) and not isinstance(left, bool) and 0 <= left <= MAX_INTEGER
        ):
            raise ValueError(f"{seconds} must be null or a number of seconds")
        return cls(name, None if left is None else float(left))


KEPT_SECONDS = 30.0  # seconds of a long grace that ranks keep for their own handlers of TERM


def compute_save_seconds(grace: float) -> float:
    """Return how many of a pod's last seconds its ranks may take for a checkpoint, before they get TERM.

    Args:
        grace: The seconds from the pod's own TERM to its KILL, less what the agent needs.
    """
    return max(grace / 2, grace - KEPT_SECONDS)
