"""Verifies what lies in a node's memory while its ranks are away, so that they need not when they come back.

Ranks that crash may have written anywhere. Once they are gone nobody writes to a slot, and the writer has nothing else
to do: it reads every whole slot again and leaves marks (slots/slot_marks.py).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import Manifest
from everstep.checkpoint.peers.peer_server import iterate_held_slots
from everstep.checkpoint.slots import slot_marks
from everstep.checkpoint.slots.slots import Slot

_log = logging.getLogger("everstep.checkpoint.writer")


class IdleVerifier:
    """One at a time, in a thread; whoever comes ends it. All calls are from the writer's event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._bad: set[tuple[Path, Key]] = set()
        self._task: asyncio.Task[None] | None = None
        self._stopped = threading.Event()

    def look(self, *, is_idle: bool) -> None:
        """Begin when nobody is there, end when somebody is."""
        if not is_idle:
            self.stop()
        elif self._task is None or self._task.done():
            self._stopped = threading.Event()
            self._task = asyncio.create_task(self._verify(self._stopped))

    def stop(self) -> None:
        """Stop, because somebody is there: no mark is left after this."""
        self._stopped.set()

    async def _verify(self, stopped: threading.Event) -> None:
        def alive() -> None:
            if stopped.is_set():
                raise slot_marks.Interrupted

        loop = asyncio.get_running_loop()
        for slot, manifest in await loop.run_in_executor(None, self._unmarked):
            try:
                mark = await loop.run_in_executor(None, slot_marks.verify_slot, slot, manifest, alive)
            except slot_marks.Interrupted:
                return
            if stopped.is_set():  # a slot is claimed in this loop: not between here and the mark
                return
            if mark is not None:
                slot_marks.leave_mark(slot, mark)
            elif (slot.path / "slot.json").exists():
                _log.warning("%s in %s is not as it was summed", manifest.key, slot.path)
                self._bad.add((slot.path, manifest.key))

    def _unmarked(self) -> list[tuple[Slot, Manifest]]:
        return [
            (slot, manifest)
            for slot, manifest in iterate_held_slots(self._directory)
            if (slot.path, manifest.key) not in self._bad and not slot_marks.is_marked(slot, manifest)
        ]
