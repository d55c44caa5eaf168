"""The mark of a start: which start of the ranks has saved a share of a checkpoint, where several have the same attempt.

A launcher may start ranks again under the attempt that they were given. They reach steps again whose names are taken,
maybe with other values. The mark is a value that all ranks of one start share: shares of two starts disagree about it,
and are therefore no checkpoint together, in the store and in the memory of nodes alike. Pure.
"""

from __future__ import annotations

import secrets

from everstep.checkpoint.format.user_metadata import VALUE

MARK = "%start"  # no object's name can begin with a bare %
NO_STATE = frozenset({MARK, VALUE})  # values beside those of a state


def draw_mark() -> str:
    """Return the mark of a start, which no other one has."""
    return secrets.token_hex(8)


def pack_mark(mark: str) -> dict[str, object]:
    """Return the value that a manifest holds for a mark; none where the attempt has one start only."""
    return {MARK: mark} if mark else {}
