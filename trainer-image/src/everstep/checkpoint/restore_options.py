"""Options of a restore, beside the objects: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.checkpoint.casting import NO_CASTS, Casts
from everstep.checkpoint.keys import Key
from everstep.checkpoint.selection import Rename


@dataclass(frozen=True)
class RestoreOptions:
    """`step`: exactly this step, or key. `is_strict`: names that do not meet are errors. See Checkpointer.restore.

    `optional`: objects of each rank that stay as they are where a checkpoint has none, as one that was imported.
    """

    step: int | Key | None = None
    is_strict: bool = True
    rename: Rename | None = None
    casts: Casts = NO_CASTS
    allow_pickle: bool = False
    optional: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int | Key | None):
            raise TypeError(
                f"step= is the number of a step or the key of a checkpoint, not a {type(self.step).__name__}: an "
                "object that is saved cannot be called step, strict, rename or cast"
            )

    def means(self, key: Key) -> bool:
        """Whether a checkpoint may be the one that is asked for."""
        return self.step is None or self.step in (key, key.step)
