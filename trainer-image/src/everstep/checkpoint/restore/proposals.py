"""Choose which checkpoint all ranks try next: the greatest that the store or the nodes may have and that is not bad."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.catalog.leases import SECONDS, CheckpointLease
from everstep.checkpoint.errors import StoreError
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.peers import peer_server
from everstep.checkpoint.ranks.topology import Topology
from everstep.checkpoint.slots.slot_files import is_own
from everstep.checkpoint.slots.slots import Slots
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.store.retry import Retry
from everstep.checkpoint.writer.control import is_occupied

_log = logging.getLogger("everstep.checkpoint")

MEMORY = "memory"
PEER = "peer"
STORE = "store"


def make_proposal(
    memory: Path,
    topology: Topology,
    *,
    run: str | None = None,
    given: Attempt | None = None,
    claimed: Attempt | None = None,
    while_waiting: Callable[[], None] = lambda: None,
) -> dict[str, Any] | None:
    """Return the shares of checkpoints that this rank offers: in its node's memory, its own and copies of others'.

    One rank of each node tells them. There are none where a live run has the slots, because a process that reads a slot
    keeps that run from filling it; nor where the slots are another user's.

    Args:
        memory: The slots' directory.
        topology: This rank's place among the ranks.
        run: See peer_server.iterate_held_slots().
        given: See control.is_occupied().
        claimed: See control.is_occupied().
        while_waiting: See control.is_occupied().

    Returns:
        The offer as a message; None when this rank offers nothing.
    """
    if topology.local != 0 or not is_own(memory):
        return None
    if is_occupied(memory, given=given, claimed=claimed, while_waiting=while_waiting):
        return None
    shares = {
        (str(manifest.key), claim.node, claim.nodes): [int(Path(part.name).stem) for part in manifest.parts]
        for slot, manifest in peer_server.iterate_held_slots(memory, run)
        if (claim := slot.claimed()) is not None
    }
    own = [manifest.key for slot, manifest in peer_server.iterate_held_slots(memory, run) if slot.path.parent == memory]
    newest = next(iter(own), None)
    is_told = newest is not None and not _may_hold_newer(Slots(memory), newest)
    claimed_key = Slots(memory).find_newest_claimed(run)
    return {
        "node": topology.node,
        "newest": str(newest) if is_told else None,  # in slots of its own
        "claimed": None if claimed_key is None else str(claimed_key),  # the same, whole or not
        "shares": [[*which, ranks] for which, ranks in shares.items()],
    }


def _may_hold_newer(slots: Slots, newest: Key) -> bool:
    """Tell whether a slot that was whole, and of which that cannot be read any more, may be of a newer checkpoint."""
    for slot in slots:
        if slot.manifest() is None and (slot.path / "claim.json").exists():
            try:
                if Key.parse((slot.path / "whole").read_text()) > newest:
                    return True
            except FileNotFoundError:
                continue
            except ValueError:
                return True
    return False


Shares = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Proposal:
    """The checkpoint that all ranks try next.

    Attributes:
        key: The checkpoint; None when there is nothing to try.
        tier: "memory" also means the memory of other nodes.
        shares: By the number of the node that saved it, the ranks whose parts are in a share and the nodes of this run
            that hold it.
        complete: All shares are held, so that the store is not needed.
        rejected: Newer checkpoints that are bad, with the reason.
        steps: When there is nothing to try, the steps that there are.
        newest: The greatest checkpoint that there is, or that the writer of a run which is over may still store, good
            or not, whatever was asked for.
    """

    key: str | None
    tier: str = ""
    shares: Shares = ()
    complete: bool = False
    rejected: dict[str, str] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    newest: str | None = None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Proposal:
        """Return the proposal that asdict() and JSON made `fields` of."""
        shares = tuple((tuple(ranks), tuple(nodes)) for ranks, nodes in fields["shares"])
        return cls(**{**fields, "shares": shares, "steps": tuple(fields["steps"])})


class Proposals:
    """Rank 0's list, made anew for every proposal: while one checkpoint was read, newer ones may have come."""

    def __init__(
        self,
        store: Store,
        topology: Topology,
        *,
        reach: bool,
        attempt: Attempt | None,
        means: Callable[[Key], bool] = lambda key: True,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """`reach`: nodes can read each other's memory. `attempt`: of this run, if it is known. `means`: whether a
        checkpoint may be the one that is asked for. `wait`: before the store is asked again, so many seconds."""
        self._means = means
        self._retry = Retry(tries=5, first=0.5, longest=5.0, sleep=wait)
        self._store = store
        self._nodes = topology.nodes
        self._reach = reach
        self._attempt = attempt
        self._rejected: dict[tuple[Key, str], str] = {}
        self._last: tuple[Key, str] | None = None
        self._lease: CheckpointLease | None = None

    def next(self, offers: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
        """Return the next proposal as all ranks hear it (see Proposal).

        StoreError when the store cannot be listed and the nodes do not hold what must be the newest: no fresh start.
        """
        everything = _list_held_shares(offers)
        held = {key: shares for key, shares in everything.items() if self._means(key)}
        complete = {key for key, shares in held.items() if self._serves(shares)}
        there = self._committed(max(held, default=None), complete, offers)
        committed = {key for key in there if self._means(key)}
        waiting = [Key.parse(offer["claimed"]) for offer in offers if offer and offer.get("claimed")]
        newest = max([*there, *everything, *waiting], default=None)
        seen = None if newest is None else str(newest)
        # What is committed may lie in memory in part; the store has the rest.
        tries = [(key, MEMORY) for key in held if key in complete or key in committed]
        tries += [(key, STORE) for key in committed]
        left = [each for each in tries if each not in self._rejected]
        told: dict[str, str] = {}
        for (key, tier), why in self._rejected.items():
            told[str(key)] = f"{told[str(key)]}; {tier}: {why}" if str(key) in told else f"{tier}: {why}"
        if not left:
            steps = tuple(sorted({key.step for key in there}))
            return asdict(Proposal(None, rejected=told, steps=steps, newest=seen))
        key, tier = self._last = max(left, key=lambda each: (each[0], each[1] == MEMORY))
        told.pop(str(key), None)  # a bad copy in memory is no older step
        shares = held[key] if tier == MEMORY else ()
        alone = tier == MEMORY and key in complete
        self.close()
        if not alone:  # slots are held by who reads them
            self._hold(key)
        return asdict(Proposal(str(key), tier, shares, alone, told, newest=seen))

    def reject(self, why: str) -> None:
        """Note that the last proposal is bad. Only rank 0's list counts, but every rank may say so."""
        if self._last is not None:
            self._rejected[self._last] = why

    def renew(self) -> None:
        """Holds the lease on for another while, when half of it is over."""
        if self._lease is not None and self._lease.seconds_left < SECONDS / 2:
            with contextlib.suppress(StoreError):
                self._lease.renew()

    def close(self) -> None:
        """Give the lease back."""
        if self._lease is not None:
            with contextlib.suppress(StoreError):  # it expires by itself
                self._lease.release()
            self._lease = None

    def _serves(self, shares: Shares) -> bool:
        """Tell whether every node gets at every share without the store."""
        return all(len(nodes) >= (1 if self._reach else self._nodes) for _, nodes in shares)

    def _committed(
        self, newest: Key | None, complete: Collection[Key], offers: Sequence[dict[str, Any] | None]
    ) -> set[Key]:
        """Return the keys that the store has.

        The set is empty when the store cannot be asked and `newest`, the greatest in memory, must do.

        Raises:
            StoreError: It cannot be asked, and `newest` will not do.
        """
        try:
            return set(self._retry(lambda: list_candidates(self._store)))
        except StoreError as error:
            bad = newest not in complete or (newest, MEMORY) in self._rejected
            if newest is None or bad or not self._must_be_newest(newest, offers):
                raise
            _log.warning("%s: %s is in the memory of the nodes, and nothing newer can be in the store", error, newest)
            return set()

    def _must_be_newest(self, key: Key, offers: Sequence[dict[str, Any] | None]) -> bool:
        """Tell whether nothing newer than the greatest key in memory can be committed, as far as nodes can tell.

        No attempt lies between its and ours. And had its attempt committed a greater one, the slots of every node would
        have been whole then; a node's newest slot that is whole is only ever given up for a newer one.
        """
        ours = self._attempt
        if ours is None or (key.attempt.epoch, key.attempt.generation + 1) != (ours.epoch, ours.generation):
            return False
        return any(offer["newest"] == str(key) for offer in offers if offer)

    def _hold(self, key: Key) -> None:
        try:
            self._lease = CheckpointLease(self._store, key)
        except StoreError as error:
            # A reader that may not write reads all the same: what vanishes under it is a reason to fall back.
            _log.warning("no lease on checkpoint %s: %s", key, error)


def _list_held_shares(offers: Sequence[dict[str, Any] | None]) -> dict[Key, Shares]:
    """Return the shares of each checkpoint that nodes hold."""
    found: dict[Key, dict[int, tuple[list[int], list[int]]]] = defaultdict(dict)
    counts: dict[Key, int] = {}
    for offer in filter(None, offers):
        for text, node, nodes, ranks in offer["shares"]:
            key = Key.parse(text)
            counts[key] = nodes
            found[key].setdefault(node, (ranks, []))[1].append(offer["node"])
    nobody: tuple[list[int], list[int]] = ([], [])
    return {
        key: tuple(
            (tuple(ranks), tuple(nodes))
            for ranks, nodes in (shares.get(number, nobody) for number in range(counts[key]))
        )
        for key, shares in found.items()
    }
