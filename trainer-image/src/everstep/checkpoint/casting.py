"""Decide which types of numbers may become which others on their way out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

Cast: TypeAlias = bool | torch.dtype | Mapping[torch.dtype, torch.dtype] | None


def _keeps_meaning(one: torch.dtype, other: torch.dtype) -> bool:
    """Tell whether a cast keeps what the numbers mean: no fraction is cut off, and nothing becomes a truth value."""
    kinds = [(each.is_floating_point, each.is_complex, each is torch.bool) for each in (one, other)]
    return kinds[0] == kinds[1]


@dataclass(frozen=True)
class Casts:
    """The types that `cast=` asks for. True: whatever the object has; a type: for all floating numbers; a mapping: by
    the saved type."""

    cast: Cast = None

    def allows(self, saved: torch.dtype, here: torch.dtype) -> bool:
        """Tell whether a saved tensor may be cast into one of another type."""
        if self.cast is True:
            return _keeps_meaning(saved, here)
        return self.cast not in (None, False) and self.result(saved) is here

    def result(self, saved: torch.dtype) -> torch.dtype:
        """Return the type that a saved tensor gets where no object says one.

        Raises:
            ValueError: `cast` is True, which only an object can answer.
        """
        if self.cast is None or self.cast is False:
            return saved
        if self.cast is True:
            raise ValueError("cast=True needs an object that has a type: give load() a type, as cast=torch.bfloat16")
        if isinstance(self.cast, torch.dtype):
            return self.cast if saved.is_floating_point and self.cast.is_floating_point else saved
        return self.cast.get(saved, saved)


NO_CASTS = Casts()
