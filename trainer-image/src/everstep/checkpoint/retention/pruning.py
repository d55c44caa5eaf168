"""Pruning by hand: beside a run that may save and remove checkpoints of the same store meanwhile.

Retention of the run itself (retention.py) knows that nobody else removes what it reads. Here what is to stay is held
from before it is read until the others are gone.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from everstep.checkpoint.catalog import leases
from everstep.checkpoint.catalog.best import KeepBest
from everstep.checkpoint.catalog.candidates import OnBytes, list_candidates
from everstep.checkpoint.catalog.leases import ReadLease
from everstep.checkpoint.catalog.needed_checkpoints import find_needed_checkpoints
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.retention import retention
from everstep.checkpoint.retention.retention import Pruned
from everstep.checkpoint.store.base import Store

_PASSES = 10  # over a store whose checkpoints are removed before they can be held; each holds one more, as a rule


@dataclass
class HeldCheckpoints(AbstractContextManager["HeldCheckpoints"]):
    """Leases on checkpoints of a store, until they are let go."""

    store: Store
    _held: dict[Key, ReadLease] = field(default_factory=dict)

    def hold(self, key: Key) -> None:
        """Hold a checkpoint, if it is not held yet."""
        if key not in self._held:
            self._held[key] = ReadLease(self.store, key)

    def renew(self) -> None:
        """Hold all of them for longer, where half of the time is over. From any thread."""
        for each in list(self._held.values()):
            each.renew()

    def release_others(self, keys: Collection[Key]) -> None:
        """Let go of all but these."""
        for key in self._held.keys() - set(keys):
            self._held.pop(key).release()

    def __exit__(self, *error: object) -> None:
        self.release_others(())


@dataclass(frozen=True)
class Pruning:
    """The outcome: what is verified and stays, and what of the others was removed; with `dry_run`, what would be."""

    verified: tuple[Key, ...]
    planned: tuple[Key, ...] = ()
    done: Pruned = field(default_factory=Pruned)


def prune_by_hand(
    found: VerifiedCheckpoints,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: KeepBest | None = None,
    dry_run: bool = False,
    on_bytes: OnBytes = lambda count: None,
) -> Pruning:
    """Verify what is to stay, and remove the others; nothing where nothing is verified.

    Args:
        found: Of a store; what it has verified is held until the end.
        keep_last: How many verified ones stay.
        keep_every: Steps that stay, as multiples of this.
        keep_best: Which stay beside these for a number in their metadata.
        dry_run: Remove nothing.
        on_bytes: Called with the bytes that were read since, from any thread.

    Raises:
        CheckpointError: Others remove checkpoints faster than they can be held; or some would go, and none has the
            number by which the best are kept.
        StoreError: The store did not do it; what is left is found by the next call.
    """
    with HeldCheckpoints(found.store) as held:

        def advance(count: int) -> None:
            held.renew()
            on_bytes(count)

        found.hold = held.hold
        for _ in range(_PASSES):
            # Listed anew: what a run has removed since has made room for a newer one.
            gone = len(found.removed)
            keys = list_candidates(found.store)
            count = len(found.newest(keys, keep_last, on_bytes=advance))
            verified = retention.find_kept(found, keys, keep_last=keep_last, keep_every=keep_every, on_bytes=advance)
            if count == keep_last or len(found.removed) == gone:
                break
        if not verified:
            if found.removed and not (found.bad or found.unknown):
                raise CheckpointError(
                    f"checkpoints of {found.store.url} are removed by somebody else faster than they can be verified: "
                    "nothing is removed here; try again, or leave it to the run whose store it is"
                )
            return Pruning(())
        held.release_others(verified)
        now = leases.find_time(found.store)
        leased = {key for key, until in leases.list_leases(found.store).values() if until > now}
        best = set() if keep_best is None else keep_best.select(found, keys)
        stay = set(keys) - set(retention.plan_retention(keys, leased | best, verified, keep_last, keep_every))
        if keep_best is not None and not best and len(stay) < len(keys):
            raise CheckpointError(f"{keep_best.explain_missing(found, keys)}: nothing is removed")
        needed = best | find_needed_checkpoints(stay, found.needs)
        if dry_run:
            leased |= needed
            planned = retention.plan_known(found.store, keys, leased, verified, keep_last, keep_every)
            return Pruning(tuple(verified), tuple(planned))
        done = retention.prune_store(found.store, verified, keep_last=keep_last, keep_every=keep_every, keep=needed)
        return Pruning(tuple(verified), done=done)
