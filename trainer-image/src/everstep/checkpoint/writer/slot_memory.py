"""The memory of a node's slots: allocated while training runs if there is room, and given back in the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.host import available_memory
from everstep.checkpoint.peers import replica_slots
from everstep.checkpoint.peers.replica_slots import Copies
from everstep.checkpoint.slots.slots import Slot, Slots

_log = logging.getLogger("everstep.checkpoint.writer")

_FILES_OF_A_RANK = 4  # in a slot: a part, what is said of it, and the slot's own files


def is_other_run(one: str, other: str) -> bool:
    """Tell whether two names are those of different runs; a run whose store could not be asked has no name."""
    return bool(one and other) and one != other


class SlotMemory:
    """The memory of a node's own slots and of the copies that it keeps of another node's.

    Args:
        slots: Of this node.
        copies: Of another node's slots.
    """

    def __init__(self, slots: Slots, copies: Copies) -> None:
        self._slots = slots
        self._copies = copies
        self._reserving: asyncio.Future[None] | None = None
        self._removing_since: float | None = None  # processes that restore are waited for since then
        self.found_no_room = False  # at the last try

    @property
    def is_reserving(self) -> bool:
        """Tell whether pages are being allocated."""
        return self._reserving is not None and not self._reserving.done()

    async def wait_until_ended(self) -> None:
        """Wait until no pages are being allocated, however that ended."""
        if self._reserving is not None:
            await asyncio.wait([self._reserving])

    async def wait_until_reserved(self) -> None:
        """Wait for the pages.

        Raises:
            CheckpointError: They could not be allocated.
        """
        if self._reserving is not None:
            await asyncio.shield(self._reserving)

    async def reserve(self, sizes: list[int], kept: list[int], count: int, *, insists: bool) -> str | None:
        """Say at once whether there is room; the pages come while training runs: see wait_until_reserved.

        Args:
            sizes: Bytes of this node's parts.
            kept: Bytes of another node's parts, of which copies are kept.
            count: The number of slots.
            insists: Whether the run goes on only with copies.

        Returns:
            Why the copies find no room, where the run does not insist on them.

        Raises:
            InsufficientMemory: There is no room.
        """
        why = None
        if kept:
            await asyncio.get_running_loop().run_in_executor(None, self._copies.remove_surplus, count)
        try:
            own = self._slots.need(sizes, count)
            need = self._copies.need(kept, count) if kept else 0
            if own + need > 0:
                files = count * _FILES_OF_A_RANK * (len(sizes) + len(kept) + 1)
                available_memory.check_files(self._slots.directory, max([*sizes, *kept]), files)
            available_memory.check_memory(self._slots.directory, own + need, count, count if kept else 0)
        except available_memory.InsufficientMemory as error:
            self.found_no_room = True
            if not kept or insists:
                raise
            self._slots.check(sizes, count)
            why, kept = str(error), []
        self.found_no_room = False
        self._reserving = asyncio.get_running_loop().run_in_executor(None, self._allocate, sizes, kept, count)
        return why

    def _allocate(self, sizes: list[int], kept: list[int], count: int) -> None:
        try:
            self._slots.reserve(sizes, count)
            if kept:
                self._copies.reserve(kept, count)
        except OSError as error:
            raise CheckpointError(
                f"{count} slots with parts of up to {max(sizes)} bytes cannot be made in {self._slots.directory}: "
                f"{error}; see its file system's space and inodes (df, df -i) and the limit of a file (ulimit -f)"
            ) from error

    def find_slots_of_other_runs(self, run: str) -> list[Slot]:
        """Return the slots and copies that are claimed by another run than this one."""
        places = [*self._slots, *replica_slots.open_peer_copies(self._slots.directory)]
        return [slot for slot in places if (claim := slot.claimed()) is not None and is_other_run(claim.run, run)]

    def find_slots(self, means: Callable[[Key], bool]) -> list[Slot]:
        """Return the slots and copies that are claimed for checkpoints of which this is true."""
        places = [*self._slots, *replica_slots.open_peer_copies(self._slots.directory)]
        return [slot for slot in places if (claim := slot.claimed()) is not None and means(claim.key)]

    def is_empty(self) -> bool:
        """Tell whether there is no slot, of this node or of another one's."""
        return not any(True for _ in (*self._slots, *replica_slots.open_peer_copies(self._slots.directory)))

    def cancel_removal(self) -> None:
        """Forget a removal that waits for readers: ranks are here again, and it begins anew when they are gone."""
        self._removing_since = None

    def remove(self, patience_seconds: float) -> bool:
        """Remove the slots, and tell whether the memory was given back.

        Args:
            patience_seconds: How long a process that restores from them is waited for, from the first call on.
        """
        now = time.monotonic()
        since = self._removing_since or now
        if self._slots.remove(is_forced=now - since >= patience_seconds):
            return True
        if self._removing_since is None:
            _log.info("the slots are still read: they are removed after that, or in %g s", patience_seconds)
            self._removing_since = now
        return False
