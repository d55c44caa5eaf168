"""Other checkpoints that a folder cannot do without: the best one of a Hugging Face training, which its last one names.

They are in the value that describes the folder, as keys. Retention keeps them as long as what needs them.

The writer reads it for retention: this module must not import torch, nor what knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from everstep.checkpoint.format.keys import Key

FOLDER = "folder"  # the value that describes a folder
NEEDS = "needs"


def read_needs(values: Mapping[str, object]) -> tuple[Key, ...]:
    """Return the keys that a checkpoint with these values needs; none where they cannot be read."""
    packed = values.get(FOLDER)
    try:
        described = dict(packed["dict"]) if isinstance(packed, dict) else {}
        return tuple(Key.parse(each) for each in described.get(NEEDS, ()))
    except (KeyError, TypeError, ValueError):
        return ()


def find_needed_checkpoints(keys: Iterable[Key], needs: Callable[[Key], Iterable[Key]]) -> set[Key]:
    """Return the checkpoints that these need, and those that these need in turn."""
    found: set[Key] = set()
    unseen = set(keys)
    while unseen:
        new = set(needs(unseen.pop())) - found
        found |= new
        unseen |= new
    return found
