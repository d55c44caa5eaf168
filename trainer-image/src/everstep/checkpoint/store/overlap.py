"""Keep what is made, replaced or removed on this machine apart from a store that lies there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import FOLDERS, HINT, MANIFESTS, RUN
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


def check_is_place(store: Store) -> None:
    """See that a folder can be a store: no file stands in its way, and no folder where a store has a file of its own.

    Raises:
        CheckpointError: Something does, as another store in whose files this one lies, or the reverse.
    """
    root = _get_root(store)
    if root is None:
        return
    file = taken = None
    with suppress(PermissionError):  # what may not be looked at is told by whoever opens it
        file = next((each for each in (root, *root.parents) if each.exists() and not each.is_dir()), None)
        taken = next((root / name for name in (RUN, HINT) if (root / name).is_dir()), None)
    if file is not None:
        owner = f", a part of the store {file.parent}" if (file.parent / MANIFESTS).is_dir() else ""
        raise CheckpointError(
            f"the store {root} cannot be made: {file} is a file{owner}. Give the store another folder"
        )
    if taken is not None:
        raise CheckpointError(
            f"the store {root} cannot be used: {taken} is a folder, maybe of another store, where a store has a file. "
            "Give the store another folder"
        )


def check_is_text(path: str, what: str) -> None:
    """See that a path can be told to other processes, which get it in UTF-8.

    Raises:
        CheckpointError: It has bytes that are none.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{what} {path!r} is not UTF-8: give a path that is") from error


def _get_root(store: Store) -> Path | None:
    return None if "://" in store.url else Path(store.url)
