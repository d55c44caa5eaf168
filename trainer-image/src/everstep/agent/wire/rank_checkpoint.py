"""A rank's words about checkpoints: the newest one that is stored, saves that failed, what it began from, and how far
it is, counted as its checkpoints are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

TIERS = ("memory", "peer", "store")
MAX_INTEGER = 2**53  # JSON readers keep no more


class RankCheckpoint(NamedTuple):
    """The newest of what a rank said; None where it said nothing.

    Attributes:
        checkpoint: The step of the newest checkpoint that is in the store.
        checkpoint_bytes: Its size, of all ranks.
        stall_ms: The milliseconds that the newest save held up training.
        checkpoints_failed: The number of saves that failed since then.
        restored: The step that this generation began from; 0 where there was no checkpoint.
        restored_ms: The milliseconds that the restore took.
        restored_from: One of TIERS: the farthest that any rank had to read from.
        restored_over: The number of newer checkpoints that were passed over because they were damaged.
        trained_step: The last step of training by the numbers of its checkpoints: what it reports as `step` may count
            batches or epochs.
        progress_step: The last step that it had reported as its progress when it told `trained_step`.
        save_every: The seconds between two of its saves; 0 where these do not go by time.
        takes_requests: Whether it saves when it is asked to (1 or 0); None: it does if it says anything.
    """

    checkpoint: int | None = None
    checkpoint_bytes: int | None = None
    stall_ms: int | None = None
    checkpoints_failed: int | None = None
    restored: int | None = None
    restored_ms: int | None = None
    restored_from: str | None = None
    restored_over: int | None = None
    trained_step: int | None = None
    progress_step: int | None = None
    save_every: int | None = None
    takes_requests: int | None = None

    def take(self, name: str, value: str) -> RankCheckpoint | None:
        """Return this with one more word of a rank.

        Args:
            name: The word's name.
            value: Its value, of which nothing is known yet.

        Returns:
            None where the name is none of these, or the value cannot be its value.
        """
        if name == "restored_from":
            return self._replace(restored_from=value) if value in TIERS else None
        if name not in NAMES or not (value.isascii() and value.isdecimal() and len(value) <= 16):
            return None
        said: dict[str, Any] = {name: int(value)}
        return self._replace(**said) if said[name] <= MAX_INTEGER else None

    def to_json(self) -> dict[str, Any]:
        """Return what was said, by the names of the words."""
        said = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in said.items() if value is not None}

    @classmethod
    def from_json(cls, data: Any) -> RankCheckpoint | None:
        """Return what to_json() gave; None, or less, where it is something else."""
        if not isinstance(data, Mapping):
            return None
        found = cls()
        for name in NAMES:
            value = data.get(name)
            if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
                found = found.take(name, str(value)) or found
        return None if found == cls() else found


NAMES = frozenset(RankCheckpoint._fields)
