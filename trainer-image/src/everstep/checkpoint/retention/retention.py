"""Choose which checkpoints are kept, and remove others: never the newest that were verified, never one that is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from everstep.checkpoint.catalog.best import KeepBest
from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.catalog.leases import find_time, list_lease_objects, list_leases
from everstep.checkpoint.catalog.manifests import read_index
from everstep.checkpoint.catalog.needed_checkpoints import find_needed_checkpoints
from everstep.checkpoint.catalog.verification import OnBytes, VerifiedCheckpoints, list_marks
from everstep.checkpoint.errors import Damaged, Missing, UnknownFormat
from everstep.checkpoint.format.keys import DATA, Attempt, Key
from everstep.checkpoint.store.base import Store, StoredObject

SWEEP_AFTER = 24 * 3600.0  # seconds; longer than any save takes


@dataclass(frozen=True)
class Pruned:
    """Checkpoints that were removed, leftovers of saves that never became one, temporary files and dead leases."""

    removed: tuple[Key, ...] = ()
    leftovers: tuple[Key, ...] = ()
    swept: int = 0


def plan_retention(
    keys: Collection[Key],
    leased: Collection[Key],
    verified: Collection[Key],
    keep_last: int,
    keep_every: int | None = None,
) -> list[Key]:
    """Return what of the committed `keys` may go, smallest first.

    Only verified ones count: the greatest `keep_last` of them stay, and whatever is greater than one of these, damaged
    or not verified yet. Nothing goes while there are fewer. Of each step that is a multiple of `keep_every` the
    greatest stays, and the greatest verified one.

    Args:
        keys: All that was committed.
        leased: Those that somebody reads: they stay.
        verified: Those that were read back and found good; at least the `keep_last` newest of them.
        keep_last: How many verified ones stay.
        keep_every: Steps that stay, as multiples of this.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is at least 1, not {keep_last}")
    good = sorted(set(verified) & set(keys), reverse=True)
    if len(good) < keep_last:
        return []
    kept = set(leased)
    if keep_every is not None:
        for some in (sorted(keys), reversed(good)):
            kept |= {key for step, key in {key.step: key for key in some}.items() if step % keep_every == 0}
    return [key for key in sorted(keys) if key < good[keep_last - 1] and key not in kept]


def plan_known(
    store: Store,
    keys: Collection[Key],
    leased: Collection[Key],
    verified: Collection[Key],
    keep_last: int,
    keep_every: int | None = None,
) -> list[Key]:
    """Return what plan_retention() gives, without what another version of everstep wrote.

    Only that version can tell what may go.
    """
    return [key for key in plan_retention(keys, leased, verified, keep_last, keep_every) if not _is_unknown(store, key)]


def find_kept(
    found: VerifiedCheckpoints,
    keys: Collection[Key],
    *,
    keep_last: int,
    keep_every: int | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> list[Key]:
    """Return the verified checkpoints for whose sake others may go, the greatest first, for plan_retention().

    These are the `keep_last` newest; and of a multiple of `keep_every` that several attempts have saved, the greatest.
    """
    kept = set(found.newest(keys, keep_last, on_bytes=on_bytes))
    if keep_every is not None:
        several: dict[int, list[Key]] = defaultdict(list)
        for key in keys:
            if key.step % keep_every == 0:
                several[key.step].append(key)
        for own in several.values():
            if len(own) > 1:
                kept.update(found.newest(own, 1, on_bytes=on_bytes))
    return sorted(kept, reverse=True)


def prune_store(
    store: Store,
    verified: Collection[Key],
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep: Collection[Key] = (),
    sweep_after: float = SWEEP_AFTER,
    clock: Callable[[], float] | None = None,
) -> Pruned:
    """Remove what plan_retention() gives, and what is older than `sweep_after` seconds and belongs to no checkpoint.

    The manifest goes before its data, so that what is half removed is not found; what nodes have announced goes next,
    so that what is half removed can be saved again. What a killed call leaves, the next one removes. `keep`: stays in
    any case. `clock`: of the store, which is asked by default; ages are told by no other.
    """
    # Data is listed before manifests: what is committed in between has its manifest in the second list.
    data = _list_data(store)
    keys = list_candidates(store)
    now = find_time(store) if clock is None else clock()
    held = list_leases(store)
    stays = {key for key, expires in held.values() if expires > now} | set(keep)
    removed = plan_known(store, keys, stays, verified, keep_last, keep_every)
    marked = list_marks(store)
    for key in removed:
        store.delete([key.manifest_name])
        # Data before marks: what is half removed is nobody's, and the next call finds it by its data or its marks.
        _remove_files(store, key, [*data.get(key, ()), *marked.get(key, ())])
    newest = max(set(verified) & set(keys), default=None)
    left: dict[Key, list[StoredObject]] = {}
    for found in (data, marked):
        for key, entries in found.items():
            if newest is not None and key < newest and key not in keys:
                left.setdefault(key, []).extend(entries)
    old = now - sweep_after
    leftovers = [key for key, entries in left.items() if max(entry.modified for entry in entries) < old]
    for key in leftovers:
        _remove_files(store, key, left[key])
    dead = [
        entry.name
        for entry in list_lease_objects(store)
        if entry.modified < now - sweep_after and (entry.name not in held or held[entry.name][1] <= now)
    ]
    store.delete(dead)
    return Pruned(tuple(removed), tuple(sorted(leftovers)), store.sweep("", now - sweep_after) + len(dead))


def prune_verified(
    found: VerifiedCheckpoints,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: KeepBest | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> Pruned:
    """Find the verified checkpoints of a store and prune the others; nothing is read where nothing could go.

    A mark is believed as far as the files are there, as large as they were: see VerifiedCheckpoints. A person who has
    time has all of them read again, by `believe_marks=False`.

    Raises:
        StoreError: The store did not do it; what is left is found by the next call.
    """
    keys = list_candidates(found.store)
    best = set() if keep_best is None else keep_best.select(found, keys)
    if not plan_retention(keys, best, keys, keep_last, keep_every):
        return Pruned()
    verified = find_kept(found, keys, keep_last=keep_last, keep_every=keep_every, on_bytes=on_bytes)
    stay = set(keys) - set(plan_retention(keys, best, verified, keep_last, keep_every))
    needed = find_needed_checkpoints(stay, found.needs)
    return prune_store(found.store, verified, keep_last=keep_last, keep_every=keep_every, keep=best | needed)


def remove_uncommitted(store: Store, attempt: Attempt, after: Key | None) -> None:
    """Remove what an attempt has stored of saves that were never committed, and are later than a checkpoint.

    Args:
        store: Where nobody writes for this attempt at this moment.
        attempt: Its saves of these steps will have the same names.
        after: That checkpoint stays, as do those before it; None: nothing stays but what is committed.
    """
    data, marked, keys = _list_data(store, f"{DATA}{attempt}/"), list_marks(store), list_candidates(store)
    for key in {*data, *marked}.difference(keys):
        if key.attempt == attempt and (after is None or key > after):
            _remove_files(store, key, [*data.get(key, ()), *marked.get(key, ())])


def _remove_files(store: Store, key: Key, entries: Collection[StoredObject]) -> None:
    """Remove data and marks of what is no checkpoint any more: what nodes have announced goes before all else.

    An announcement says that what it names is there: who saves the same checkpoint again believes it. A store may
    remove the names of one call in any order.
    """
    announced = [entry.name for entry in entries if key.is_node_name(entry.name)]
    store.delete(announced)
    gone = set(announced)
    store.delete([entry.name for entry in entries if entry.name not in gone])


def _is_unknown(store: Store, key: Key) -> bool:
    """Tell whether another version of everstep wrote this checkpoint: only that one can tell what may go."""
    try:
        read_index(store, key)
    except UnknownFormat:
        return True
    except (Missing, Damaged):
        pass
    return False


def _list_data(store: Store, prefix: str = DATA) -> dict[Key, list[StoredObject]]:
    found: dict[Key, list[StoredObject]] = defaultdict(list)
    for entry in store.list(prefix):
        with suppress(ValueError):  # no file of a checkpoint: somebody else's
            found[Key.of_data(entry.name)].append(entry)
    return found
