"""Sends this node's newest whole slot to the node that keeps its copy, beside everything else a writer does.

One copy at a time. A slot that is filled anew while it is sent is a copy that fails; so is anything else, and nobody
waits for it: the next save is the next chance.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import CHUNK, Manifest, encode_manifest
from everstep.checkpoint.peers.peer_link import Address, PeerLink, PeerLost
from everstep.checkpoint.slots.slots import Claim, Slot


class _Job(NamedTuple):
    slot: Slot
    claim: Claim
    manifest: Manifest


class Copier:
    """`report(key, why)` is called in a thread when a copy ends: `why` is None when the other node keeps it."""

    def __init__(self, report: Callable[[Key, str | None], None]) -> None:
        self._report = report
        self._aim: tuple[Address, str] | None = None
        self._next: _Job | None = None
        self._sending = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Tell whether a copy is on its way or waits."""
        with self._changed:
            return self._sending or self._next is not None

    def aim(self, address: Address | None, secret: str) -> None:
        """Send copies there from now on; with None nowhere."""
        with self._changed:
            self._aim = None if address is None else (address, secret)

    def offer(self, slot: Slot, claim: Claim, manifest: Manifest) -> None:
        """Send this slot next, which is whole, instead of an older one that still waits."""
        with self._changed:
            if self._aim is None:
                return
            self._next = _Job(slot, claim, manifest)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="copier")
                self._thread.start()
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.wait_for(lambda: self._next is not None)
                job, self._next, aim = self._next, None, self._aim
                self._sending = True
            if job is None or aim is None:
                continue
            why: str | None = None
            try:
                send_slot(*aim, job.slot, job.claim, job.manifest)
            except (CheckpointError, OSError) as error:
                why = f"{error}"
                if job.slot.claimed() != job.claim:
                    why = f"its slot was needed for the next save before the copy was there ({why})"
            self._report(job.claim.key, why)


def send_slot(address: Address, secret: str, slot: Slot, claim: Claim, manifest: Manifest) -> None:
    """Send the slot, and return when the other node has verified and keeps the copy.

    Raises PeerLost; OSError when the slot is gone.
    """
    data = encode_manifest(manifest)
    with contextlib.closing(PeerLink.connect(address, secret)) as link:
        link.tell(
            {
                "verb": "put",
                "key": str(claim.key),
                "locals": claim.locals,
                "node": claim.node,
                "nodes": claim.nodes,
                "run": claim.run,
                "size": len(data),
            }
        )
        link.put(data)
        link.answer()
        try:
            for local, part in enumerate(manifest.parts):
                with slot.part(local).open("rb") as file:
                    _send_part(link, file.fileno(), part.size, lambda: slot.claimed() == claim)
        except PeerLost:
            # It may have said why before it hung up.
            link.answer()
            raise
        link.answer()


def _send_part(link: PeerLink, descriptor: int, size: int, wanted: Callable[[], bool]) -> None:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    for offset in range(0, size, 4 * CHUNK):
        if not wanted():
            raise CheckpointError("the slot is filled anew")
        link.put_file(descriptor, offset, min(4 * CHUNK, size - offset))
