"""Which checkpoints are kept, and how the others go: never the newest one that was verified, never one that is read."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from everstep.checkpoint.candidates import candidates, read_manifest
from everstep.checkpoint.errors import Damaged, Missing, UnknownFormat
from everstep.checkpoint.keys import DATA, LEASES, Key
from everstep.checkpoint.leases import leases
from everstep.checkpoint.store.base import Entry, Store

SWEEP_AFTER = 24 * 3600.0  # seconds; longer than any save takes


@dataclass(frozen=True)
class Pruned:
    """Checkpoints that were removed, leftovers of saves that never became one, temporary files and dead leases."""

    removed: tuple[Key, ...] = ()
    leftovers: tuple[Key, ...] = ()
    swept: int = 0


def plan(
    keys: Collection[Key],
    leased: Collection[Key],
    verified: Collection[Key],
    keep_last: int,
    keep_every: int | None = None,
) -> list[Key]:
    """What of the committed `keys` may go, smallest first.

    Nothing before something was verified after its commit, and only what is smaller than the newest of these: whatever
    is greater may be damaged and does not count. Of the rest the greatest `keep_last` stay, counted from the newest
    verified one, and of each step that is a multiple of `keep_every` the greatest.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is at least 1, not {keep_last}")
    newest = max(set(verified) & set(keys), default=None)
    if newest is None:
        return []
    old = sorted((key for key in keys if key <= newest), reverse=True)
    kept = {*old[:keep_last], *leased}
    if keep_every is not None:
        greatest = {key.step: key for key in reversed(old)}
        kept |= {key for step, key in greatest.items() if step % keep_every == 0}
    return [key for key in reversed(old) if key not in kept]


def prune(
    store: Store,
    verified: Collection[Key],
    *,
    keep_last: int,
    keep_every: int | None = None,
    sweep_after: float = SWEEP_AFTER,
    clock: Callable[[], float] = time.time,
) -> Pruned:
    """Remove what plan() gives, and what is older than `sweep_after` seconds and belongs to no checkpoint.

    The manifest goes before its data, so that what is half removed is not found. What a killed call leaves, the next
    one removes.
    """
    # Data is listed before manifests: what is committed in between has its manifest in the second list.
    data = _data(store)
    keys = candidates(store)
    now = clock()
    held = leases(store)
    removed = [
        key
        for key in plan(keys, {key for key, expires in held.values() if expires > now}, verified, keep_last, keep_every)
        if not _is_unknown(store, key)
    ]
    for key in removed:
        store.delete([key.manifest_name])
        store.delete([entry.name for entry in data.get(key, ())])
    newest = max(set(verified) & set(keys), default=None)
    leftovers = [
        key
        for key, entries in data.items()
        if newest is not None
        and key < newest
        and key not in keys
        and max(entry.modified for entry in entries) < now - sweep_after
    ]
    for key in leftovers:
        store.delete([entry.name for entry in data[key]])
    dead = [
        entry.name
        for entry in store.list(LEASES)
        if entry.modified < now - sweep_after and (entry.name not in held or held[entry.name][1] <= now)
    ]
    store.delete(dead)
    return Pruned(tuple(removed), tuple(sorted(leftovers)), store.sweep("", now - sweep_after) + len(dead))


def _is_unknown(store: Store, key: Key) -> bool:
    """Whether another version of everstep wrote this checkpoint: only that one can tell what may go."""
    try:
        read_manifest(store, key)
    except UnknownFormat:
        return True
    except (Missing, Damaged):
        pass
    return False


def _data(store: Store) -> dict[Key, list[Entry]]:
    found: dict[Key, list[Entry]] = defaultdict(list)
    for entry in store.list(DATA):
        with suppress(ValueError):  # no file of a checkpoint: somebody else's
            found[Key.of_data(entry.name)].append(entry)
    return found
