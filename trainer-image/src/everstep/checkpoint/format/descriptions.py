"""Names of the values by which a checkpoint says what its objects are: one value for each, beside the object's leaves.

What is in them is the state's affair (state/structure.py). Pure.
"""

from __future__ import annotations

KIND = "%kind"  # no key is called so: a key's % is always escaped
BUILT_AMONG = "%built."  # between a name and a sum of leaves, where ranks compare how they have built what is called so

_RANK = "rank"


def is_description(name: str) -> bool:
    """Tell whether a value describes an object.

    Ranks that hold the same leaves have the same descriptions (see state/structure_sums.py); of those that hold others,
    as the stages of a pipeline, that of the first one counts: rank 0 may hold more than others, built in another way.
    """
    return name == KIND or name.endswith(f".{KIND}")


def object_of(name: str) -> str:
    """Return the name of the object that a full name is a leaf of; of what is a rank's own, with the rank."""
    pieces = name.split(".")
    return ".".join(pieces[: 3 if pieces[0] == _RANK else 1])
