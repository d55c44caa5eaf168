"""Which checkpoint all ranks try next: the greatest that the store or the nodes may have, minus those that are bad."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from everstep.checkpoint.candidates import candidates
from everstep.checkpoint.errors import StoreError
from everstep.checkpoint.keys import Key
from everstep.checkpoint.leases import SECONDS, Lease
from everstep.checkpoint.slots import Slots
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.topology import Topology

_log = logging.getLogger("everstep.checkpoint")

MEMORY = "memory"
STORE = "store"


def mine(memory: Path, topology: Topology) -> list[str]:
    """What this rank offers: the checkpoints in its node's memory, told by one rank of each node."""
    if topology.local != 0 or not memory.is_dir():
        return []
    offered = []
    for slot, manifest in Slots(memory).whole():
        claim = slot.claimed()
        # Slots of another layout of nodes are worth nothing: their parts are spread over other machines.
        if claim is not None and (claim.node, claim.nodes) == (topology.node, topology.nodes):
            offered.append(str(manifest.key))
    return offered


class Proposals:
    """Rank 0's list, made anew for every proposal: while one checkpoint was read, newer ones may have come."""

    def __init__(self, store: Store, topology: Topology) -> None:
        self._store = store
        self._nodes = topology.nodes
        self._rejected: dict[tuple[Key, str], str] = {}
        self._last: tuple[Key, str] | None = None
        self._lease: Lease | None = None

    def next(self, offers: list[list[str]]) -> dict[str, Any]:
        """The next proposal as all ranks hear it. StoreError when the store cannot be listed: no fresh start then."""
        committed = set(candidates(self._store))
        held = [Key.parse(key) for offered in offers for key in offered]
        # Memory serves what every node still has. A node's own share says everything only where there is one node;
        # of others, the manifest is in the store.
        whole = {key for key in held if held.count(key) == self._nodes and (self._nodes == 1 or key in committed)}
        tries = [(key, MEMORY) for key in whole] + [(key, STORE) for key in committed]
        left = [each for each in tries if each not in self._rejected]
        told: dict[str, str] = {}
        for (key, tier), why in self._rejected.items():
            told[str(key)] = f"{told[str(key)]}; {tier}: {why}" if str(key) in told else f"{tier}: {why}"
        if not left:
            return {"key": None, "tier": "", "rejected": told}
        key, tier = self._last = max(left, key=lambda each: (each[0], each[1] == MEMORY))
        told.pop(str(key), None)  # a bad copy in memory is no older step
        self._hold(key)
        return {"key": str(key), "tier": tier, "rejected": told}

    def reject(self, why: str) -> None:
        """The last proposal is bad. Only rank 0's list counts, but every rank may say so."""
        if self._last is not None:
            self._rejected[self._last] = why

    def renew(self) -> None:
        """Holds the lease on for another while, when half of it is over."""
        if self._lease is not None and self._lease.expires - time.time() < SECONDS / 2:
            with contextlib.suppress(StoreError):
                self._lease.renew()

    def close(self) -> None:
        """Gives the lease back."""
        if self._lease is not None:
            with contextlib.suppress(StoreError):  # it expires by itself
                self._lease.release()
            self._lease = None

    def _hold(self, key: Key) -> None:
        self.close()
        try:
            self._lease = Lease(self._store, key)
        except StoreError as error:
            # A reader that may not write reads all the same: what vanishes under it is a reason to fall back.
            _log.warning("no lease on checkpoint %s: %s", key, error)
