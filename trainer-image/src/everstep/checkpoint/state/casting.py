"""Decide which types of numbers may become which others on their way out of a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from everstep.checkpoint.errors import CheckpointError

Cast: TypeAlias = bool | torch.dtype | Mapping[torch.dtype, torch.dtype] | None

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _keeps_meaning(one: torch.dtype, other: torch.dtype) -> bool:
    """Tell whether a cast keeps what the numbers mean: no fraction is cut off, and nothing becomes a truth value."""
    kinds = [(each.is_floating_point, each.is_complex, each is torch.bool) for each in (one, other)]
    return kinds[0] == kinds[1]


@functools.cache
def can_convert(one: torch.dtype, other: torch.dtype) -> bool:
    """Tell whether torch converts one type into another: of float4_e2m1fn_x2, two numbers in a byte, it does not."""
    try:
        torch.zeros(1, dtype=torch.uint8, device="cpu").expand(one.itemsize).contiguous().view(one).to(other)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _suggest_type(wrong: object) -> str:
    """Return the type that a text means, as a part of a message; "" where that cannot be told."""
    name = wrong.removeprefix("torch.") if isinstance(wrong, str) else ""
    found = getattr(torch, _SHORT.get(name, name), None) if name else None
    return f": give {found}" if isinstance(found, torch.dtype) else ""


@dataclass(frozen=True)
class Casts:
    """The types that `cast=` asks for. True: whatever the object has; a type: for all floating numbers; a mapping: by
    the saved type."""

    cast: Cast = None

    def __post_init__(self) -> None:
        """Refuse anything else: a text, or a mapping of names.

        Raises:
            TypeError: `cast` is none of these.
        """
        if self.cast is None or isinstance(self.cast, bool):
            return
        given: list[object] = [self.cast]
        if isinstance(self.cast, Mapping):
            given = [each for pair in self.cast.items() for each in pair]
        for wrong in (each for each in given if not isinstance(each, torch.dtype)):
            within = " in a mapping" if isinstance(self.cast, Mapping) else ""
            raise TypeError(
                "cast= is True, a type of torch, or a mapping from saved types to others, as cast=torch.bfloat16 or "
                f"cast={{torch.float32: torch.bfloat16}}, not {wrong!r}{within}{_suggest_type(wrong)}"
            )

    def allows(self, saved: torch.dtype, here: torch.dtype) -> bool:
        """Tell whether a saved tensor may be cast into one of another type."""
        if self.cast in (None, False) or not can_convert(saved, here):
            return False
        return _keeps_meaning(saved, here) if self.cast is True else self.result(saved) is here

    def check(self, name: str, saved: torch.dtype) -> None:
        """See that a saved tensor can have the type that it gets where no object says one.

        Raises:
            CheckpointError: torch cannot convert it.
        """
        wanted = self.result(saved)
        if wanted is not saved and not can_convert(saved, wanted):
            raise CheckpointError(
                f"{name} is of {saved}, which torch does not convert to {wanted}: leave it out with only=, or "
                "name the types that are to be cast, as cast={torch.float32: torch.bfloat16}"
            )

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
