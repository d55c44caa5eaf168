"""List the checkpoints of a store, what users noted about them, and which of them is the best. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from everstep.checkpoint.catalog.best import Mode, explain_missing_metric, rank_by_metric
from everstep.checkpoint.catalog.candidates import list_candidates, read_index
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints
from everstep.checkpoint.errors import CheckpointError, Damaged, Missing, UnknownFormat
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.user_metadata import read_metadata
from everstep.checkpoint.store.base import Store, open_store

_PASSES = 10


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint. `created` in seconds since 1970; `metadata` as the user gave it to save().

    `verified`: every node has read back what it stored, and left its mark. One without may be good all the same, and
    is verified when it is loaded, or by `everstep checkpoint verify`.
    `damaged`, `unknown`: why nothing else is known of it: its index does not hold, or another version of everstep wrote
    it, for which it may be good.
    """

    key: Key
    created: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)
    verified: bool = False
    damaged: str = ""
    unknown: str = ""

    @property
    def step(self) -> int:
        return self.key.step

    @property
    def attempt(self) -> str:
        return f"{self.key.attempt.epoch}.{self.key.attempt.generation}"


def list_checkpoints(
    uri: str | os.PathLike[str] | Store, *, options: Mapping[str, Any] | None = None
) -> list[CheckpointInfo]:
    """List what was committed in a store, the newest first. Writes nothing, and needs neither ranks nor torch.

    Args:
        uri: A folder or a URL, as given to everstep.checkpointer().
        options: Of the store.

    Raises:
        StoreError: The store cannot be listed.
    """
    store = open_store(uri, **(options or {})) if isinstance(uri, str | os.PathLike) else uri
    # A run that keeps few may have removed all of them before the first was read: others have come in their place.
    for _ in range(_PASSES):
        keys = list_candidates(store)
        if (found := _describe(store, keys)) or not keys:
            break
    return found


def _describe(store: Store, keys: list[Key]) -> list[CheckpointInfo]:
    found = []
    marked = set(VerifiedCheckpoints(store, mark=False).marked(keys))
    for key in keys:
        try:
            index = read_index(store, key)
        except UnknownFormat as error:
            found.append(CheckpointInfo(key, unknown=str(error)))
        except Damaged as error:
            found.append(CheckpointInfo(key, damaged=str(error)))
        except Missing:
            continue  # removed meanwhile
        else:
            found.append(CheckpointInfo(key, index.created, read_metadata(index.values), key in marked))
    return found


def best(
    uri: str | os.PathLike[str] | Store,
    metric: str,
    mode: Mode = "min",
    *,
    options: Mapping[str, Any] | None = None,
) -> Key:
    """Return the key of the checkpoint with the best metric in its metadata, for restore(step=…) and load(step=…).

    Args:
        uri: A folder or a URL, as given to everstep.checkpointer().
        metric: A key of the metadata; those without it, and NaN, do not count. Of equals the newest is the best.
        mode: Whether the least ("min") or the greatest ("max") is the best.
        options: Of the store.

    Raises:
        UnknownFormat: One is of another version of everstep: it may be the best, and nothing else is taken for it.
        CheckpointError: No checkpoint has the metric.
    """
    store = open_store(uri, **(options or {})) if isinstance(uri, str | os.PathLike) else uri
    found = list_checkpoints(store)
    for each in found:
        if each.unknown:
            with suppress(Missing):  # removed meanwhile
                read_index(store, each.key)  # raises what it says
    ranked = rank_by_metric(((each.key, each.metadata) for each in found), metric, mode)
    if not ranked:
        why = explain_missing_metric([each.metadata for each in found], metric)
        raise CheckpointError(f"{why}: give it to save(step, metadata={{{metric!r}: …}})")
    return ranked[0]
