"""Options of a restore, beside the objects: the same on all ranks."""

from __future__ import annotations

import hashlib
import json
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.checkpoint.catalog.selection import Rename
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.state.casting import NO_CASTS, Casts

_LONGEST = 100  # characters of a mapping that is shown whole


@dataclass(frozen=True)
class RestoreOptions:
    """`step`: exactly this step, or key. `is_strict`: names that do not meet are errors. See Checkpointer.restore.

    `optional`: objects of each rank that stay as they are where a checkpoint has none, as one that was imported.
    `elsewhere`: full names of what other ranks alone hold in dictionaries.
    """

    step: int | Key | None = None
    is_strict: bool = True
    rename: Rename | None = None
    casts: Casts = NO_CASTS
    allow_pickle: bool = False
    optional: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        step, rename = self.step, self.rename
        # NumPy's numbers are whole numbers too. A tensor is none: it is an object that was to be saved as `step`.
        is_step = isinstance(step, numbers.Integral | Key | None) and not isinstance(step, bool)
        _check("step", step, "the number of a step or the key of a checkpoint", is_step)
        if isinstance(step, numbers.Integral):
            object.__setattr__(self, "step", operator.index(step))
        _check("strict", self.is_strict, "True or False", isinstance(self.is_strict, bool))
        # A module is callable too.
        is_rename = rename is None or isinstance(rename, Mapping) or callable(rename)
        is_rename = is_rename and not hasattr(rename, "state_dict")
        _check("rename", rename, "a mapping of prefixes, or a function from name to name", is_rename)

    def describe(self) -> dict[str, str]:
        """Return each option in words, for find_difference(): the same ones where the options do the same.

        Functions are an exception: nobody can compare them, and all have the same words.
        """
        cast = self.casts.cast
        return {
            "step": str(self.step),
            "strict": str(self.is_strict),
            "rename": _describe_rename(self.rename),
            "cast": str(
                {str(old): str(cast[old]) for old in sorted(cast, key=str)} if isinstance(cast, Mapping) else cast
            ),
            "allow_pickle": str(self.allow_pickle),
        }

    def means(self, key: Key) -> bool:
        """Tell whether a checkpoint may be the one that is asked for."""
        return self.step is None or self.step in (key, key.step)


def find_difference(
    described: Sequence[Mapping[str, str]], call: str = "restore()", ranks: Sequence[int] | None = None
) -> str | None:
    """Say where ranks were given different options.

    Args:
        described: What RestoreOptions.describe() returned, by rank.
        call: That they were given to.
        ranks: The numbers of those that were asked, where they are not all ranks.

    Returns:
        Each option that differs, with the first two ranks that do and what they were given; None where all agree.
    """
    first, found = described[0], []
    called = range(len(described)) if ranks is None else ranks
    for name in first:
        rank = next((rank for rank, each in enumerate(described) if each[name] != first[name]), None)
        if rank is not None:
            found.append(
                f"{name}={first[name]} on rank {called[0]} and {name}={described[rank][name]} on rank {called[rank]}"
            )
    if not found:
        return None
    return f"{call} was given {'; '.join(found)}: give all ranks the same; nothing was loaded, no object was touched"


def _describe_rename(rename: Rename | None) -> str:
    if rename is None or callable(rename):
        return "None" if rename is None else "a function"
    ordered = dict(sorted(rename.items()))
    if len(words := str(ordered)) <= _LONGEST:
        return words
    digest = hashlib.sha256(json.dumps(ordered).encode()).hexdigest()[:12]
    return f"a mapping of {len(ordered)} prefixes (sha256 {digest})"


def _check(name: str, value: object, allowed: str, is_allowed: bool) -> None:
    if not is_allowed:
        raise TypeError(
            f"{name}= is {allowed}, not a {type(value).__name__}: an object that is saved cannot be called step, "
            "strict, rename or cast"
        )
