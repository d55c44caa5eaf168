"""Keep what is made, replaced or removed on this machine apart from a store that lies there."""

from __future__ import annotations

import os
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import FOLDERS, HINT, RUN
from everstep.checkpoint.store.base import Store

_OWN = {HINT, RUN, *(folder.rstrip("/") for folder in FOLDERS)}


def holds_store(folder: Path, store: Store) -> bool:
    """Tell whether a store is this folder of this machine, or lies in it; links count as what they lead to."""
    root = _get_root(store)
    real = Path(os.path.realpath(folder))
    return root is not None and (root == real or real in root.parents)


def check_leaves_store(target: Path, store: Store) -> None:
    """See that a store stays when something is put in the place of `target`.

    Raises:
        CheckpointError: The store is there or in it, or the place is one of the store's own.
    """
    root, real = _get_root(store), Path(os.path.realpath(target))
    is_part = root is not None and root in real.parents and real.relative_to(root).parts[0] in _OWN
    if is_part or holds_store(target, store):
        raise CheckpointError(
            f"{target} would be replaced, and {'is a part of' if is_part else 'holds'} the store {store.url}, which "
            "would be lost: give another place"
        )


def _get_root(store: Store) -> Path | None:
    return None if "://" in store.url else Path(store.url)
