"""Names of the values by which a checkpoint says what its objects are: one value for each, beside the object's leaves.

What is in them is the state's affair (state/structure.py). Pure.
"""

from __future__ import annotations

KIND = "%kind"  # no key is called so: a key's % is always escaped

_RANK = "rank"


def is_description(name: str) -> bool:
    """Whether a value describes an object. Ranks may have built a dictionary in another order: anyone's will do."""
    return name == KIND or name.endswith(f".{KIND}")


def object_of(name: str) -> str:
    """Return the name of the object that a full name is a leaf of; of what is a rank's own, with the rank."""
    pieces = name.split(".")
    return ".".join(pieces[: 3 if pieces[0] == _RANK else 1])
