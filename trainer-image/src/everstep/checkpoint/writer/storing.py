"""The filled slots of a node on their way into the store: each begun once, tried again when it fails, and given up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from everstep.checkpoint.errors import CheckpointError, StoreError
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.publish.commit import Fenced
from everstep.checkpoint.slots.slot_files import explain_removed
from everstep.checkpoint.slots.slots import Claim, Slot, Slots
from everstep.checkpoint.writer.control import WriterConfig
from everstep.checkpoint.writer.keeper import Committed, Keeper, Save

_log = logging.getLogger("everstep.checkpoint.writer")

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds until a save that failed is tried again
_DROPPING, _POLL = 10.0, 0.01  # seconds for a request that is on its way to a store when its save is dropped


class Storing:
    """All saves of a node that are being stored, in one event loop.

    Args:
        slots: Where saves that failed still lie.
        keeper: Stores a slot.
        report: Tells all ranks.
        on_end: Is called whenever a save has ended.
    """

    def __init__(
        self, slots: Slots, keeper: Keeper, report: Callable[[dict[str, Any]], None], on_end: Callable[[], None]
    ) -> None:
        self.saves: dict[Key, Save] = {}
        self.newest: Key | None = None  # that was committed here
        self.quiet_since = time.monotonic()  # when a save that somebody waits for ended last
        self._slots = slots
        self._keeper = keeper
        self._report = report
        self._on_end = on_end
        self._void: set[Key] = set()  # that nobody wants
        self._failed: set[Key] = set()  # that are tried again now and then, while their slots hold them
        self._pause, self._next_try = _FIRST_PAUSE, 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Tell whether anything is being stored, verified or pruned."""
        return bool(self._tasks)

    def start(
        self, slot: Slot, claim: Claim, config: WriterConfig, *, left_behind: bool = False, again: bool = False
    ) -> None:
        """Begin to store a slot.

        Args:
            slot: It is filled.
            claim: Of the slot.
            config: Of the run whose ranks this node has.
            left_behind: Whether it may have been stored in part before.
            again: Whether it has failed before, and all have been told.
        """
        save = self.saves[claim.key] = Save(slot, claim, config, left_behind=left_behind, again=again)
        task = asyncio.create_task(self._store(save))
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def take_over(self, config: WriterConfig) -> None:
        """Go on with what an earlier run's ranks had filled, for the run that has the node from here on."""
        for save in self.saves.values():
            save.config = config

    def give_up(self, key: Key, why: str) -> None:
        """Store this save no more, and never try it again."""
        self._void.add(key)
        if key in self.saves:
            self.saves[key].progress.given_up = why

    def give_up_earlier(self, newest: Key) -> None:
        """Give up what attempts before that of `newest` left behind: it may wait for a node that was lost."""
        for key in [key for key in self.saves if key.attempt < newest.attempt]:
            self.give_up(key, f"{newest} is newer, and its run has ended")

    async def drop(self, means: Callable[[Key], bool]) -> None:
        """Give up all saves of which this is true, and return when nothing is written for them any more: what is saved
        under the same names from here on is another thing."""
        dropped = [self.saves.pop(key) for key in [key for key in self.saves if means(key)]]
        for save in dropped:
            save.is_dropped, save.progress.given_up = True, "training has gone back to an earlier step"
        for keys in (self._void, self._failed):  # before anything is tried again
            keys.difference_update([key for key in keys if means(key)])
        # One that waits for a store that is away writes nothing after that.
        for _ in range(round(_DROPPING / _POLL)):
            if not any(save.is_under_way for save in dropped):
                break
            await asyncio.sleep(_POLL)

    def list_unsaved(self) -> list[tuple[Slot, Claim]]:
        """Return saves that failed and are not in a store, nor anything newer: these may be the only copy of a run."""
        found = [(slot, claim) for slot in self._slots if (claim := slot.claimed()) and claim.key in self._failed]
        return [each for each in found if self.newest is None or each[1].key > self.newest]

    def try_again(self, config: WriterConfig) -> None:
        """Store again what has failed, now and then, for as long as this process is here: a store may be back, and what
        was wrong with it may have been set right."""
        if not self._failed or self.saves or time.monotonic() < self._next_try:
            return
        for slot, claim in self.list_unsaved():
            self.start(slot, claim, config, left_behind=True, again=True)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._next_try = time.monotonic() + self._pause

    def tell_stalled(self) -> None:
        """Tell of each save that stands still, and tell it again."""
        for key, save in self.saves.items():
            quiet = time.monotonic() - max(save.progress.at, save.told)
            if quiet > save.config.stall_after:
                save.told = time.monotonic()
                seconds = round(save.told - save.progress.at, 1)
                self._report({"event": "stalled", "key": str(key), "seconds": seconds, "why": save.doing})

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._on_end()

    async def _store(self, save: Save) -> None:
        key, why = save.claim.key, ""
        try:
            async with asyncio.timeout(save.config.commit_timeout):
                result = await self._keep_trying(save)
        except Committed as found:
            self._failed.discard(key)
            if key.attempt == Attempt.parse(save.config.attempt) and not save.is_dropped:
                self._report_left_behind(key, found)
        except TimeoutError:
            why = save.progress.given_up = f"not stored in {save.config.commit_timeout:g} s, at last {save.doing}"
        except Exception as error:  # whatever a store does, the next save gets its chance
            _log.exception("%s was not saved", key)
            self._keeper.open_anew(save.config)
            why = f"{error}" or repr(error)
            if isinstance(error, FileNotFoundError) or not save.slot.path.exists():  # a store's errors are others
                why = explain_removed(save.slot.path)
            if isinstance(error, Fenced) and not save.is_dropped:  # that will not pass
                self._void.add(key)
        else:
            self._failed.discard(key)
            self._report({"event": "saved" if save.committed else "put", "key": str(key), **result})
        finally:
            save.is_under_way = False
            if self.saves.get(key) is save:
                del self.saves[key]
            if not save.again:
                self.quiet_since = time.monotonic()
        if save.is_dropped:
            return
        if why:
            self._fail(save, why)
        if save.committed:
            self.newest = max(key, self.newest or key)
        if save.committed or (save.stored and save.claim.node != 0):
            await self._tidy(save)

    async def _keep_trying(self, save: Save) -> dict[str, Any]:
        """See Keeper.keep. A store that is unavailable is tried again, less and less often, until `commit_timeout`:
        nobody else has the last save of a run."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._keeper.keep(save)
            except StoreError as error:
                if not error.may_pass or save.again:
                    raise
                why = f"{error}"
            _log.info("%s is tried again in %g s: %s", save.claim.key, pause, why)
            self._report({"event": "retrying", "key": str(save.claim.key), "why": why, "seconds": pause})
            save.needs_slot, save.doing = False, f"waiting to try again after: {why}"
            save.is_under_way = False
            await asyncio.sleep(pause)
            save.progress.step()
            save.is_under_way = True
            # From here to the first await nobody takes the slot.
            if save.stored is None and save.slot.claimed() != save.claim:
                raise CheckpointError(f"its slot was needed for a newer save ({why})")
            if self.newest is not None and self.newest > save.claim.key:
                raise CheckpointError(f"{self.newest} is newer, and in the store ({why})")
            save.needs_slot, save.left_behind, pause = save.stored is None, True, min(2 * pause, _LONGEST_PAUSE)

    def _report_left_behind(self, key: Key, found: Committed) -> None:
        """The writer before this one may have died before it could tell, and ranks wait for the end of this save."""
        end: dict[str, Any] = {"event": "failed", "why": f"{found}"}
        if found.size is not None:
            end = {"event": "saved", "bytes": found.size, "seconds": None, "at": time.time()}
        self._report({**end, "key": str(key)})

    def _fail(self, save: Save, why: str) -> None:
        key = save.claim.key
        if key not in self._void:
            self._failed.add(key)
        if save.again:
            return
        self._pause, self._next_try = _FIRST_PAUSE, time.monotonic() + _FIRST_PAUSE
        self._report({"event": "failed", "key": str(key), "why": why})

    async def _tidy(self, save: Save) -> None:
        try:
            await self._keeper.tidy(save)
        except Exception as error:  # old checkpoints that stay are no harm to a save
            _log.exception("retention after %s", save.claim.key)
            self._report({"event": "untidy", "key": str(save.claim.key), "why": f"{error}" or repr(error)})
