"""Follow how the saves of a session end: what the node's writer reports, and what rank 0 tells the others about it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.events import CheckpointEvent, Events, Metrics
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.host.interruptions import raise_interruption
from everstep.checkpoint.save.saver import WriterConnection
from everstep.checkpoint.save.trigger import Trigger
from everstep.checkpoint.store.base import open_store
from everstep.checkpoint.writer.control import WriterLost
from everstep.coordination.errors import KVStoreLost
from everstep.coordination.kv_store import KVStore
from everstep.coordination.message_series import MessageSeries

_log = logging.getLogger("everstep.checkpoint")


class SaveFailed(CheckpointError):
    """The last save is not in the store; earlier ones are as they were."""


class SaveOutcomes:
    """One rank's saves whose end is not known yet, by number, and how the newest other one has ended.

    Args:
        node: Its writer reports the saves of this node; node 0's knows how all of a save has ended.
        kv_store: Where rank 0 tells the others.
        leads: Whether this is rank 0.
        trigger: It learns how long a save takes.
        events: They tell the user.
        metrics: Figures of this rank.
        drop: Gives a save of this node up: its key, and why.
    """

    def __init__(
        self,
        node: WriterConnection,
        kv_store: KVStore,
        leads: bool,
        trigger: Trigger,
        events: Events,
        metrics: Metrics,
        drop: Callable[[Key, str], None],
    ) -> None:
        self.pending: dict[int, Key] = {}
        self.number = 0  # saves begun so far
        self.last: Key | None = None  # the newest one that was begun
        self._before_last: Key | None = None
        self._newest_ended = 0  # the number of the newest one whose end is known
        self.failure: str | None = None  # of the newest save that has ended
        self._node = node
        self._kv_store = kv_store
        self._results = MessageSeries(kv_store, "r", leads)
        self._leads = leads
        self._trigger = trigger
        self._events = events
        self._metrics = metrics
        self._drop = drop
        self._retrying: set[int] = set()  # rank 0: that wait until the store is back; nobody waits for them

    @property
    def in_the_way(self) -> list[Key]:
        """Return the saves that a new one has to wait for: those that are being stored.

        One that waits for a store that is unavailable would hold up all others with it; the newer one takes its place.
        """
        return [key for number, key in self.pending.items() if number not in self._retrying]

    def begin(self, key: Key) -> int:
        """Begin one more save, and return its number, which is the same on all ranks."""
        self.number += 1
        self._before_last, self.last = self.last, key
        self.pending[self.number] = key
        return self.number

    def find_number(self, key: Key) -> int | None:
        """Return the number of a save whose end is not known yet."""
        return next((number for number, pending in self.pending.items() if pending == key), None)

    # ---- what is heard

    def poll(self, timeout_seconds: float) -> None:
        """Hear what the writer of this node has to say about its saves."""
        try:
            self._hear_writer(timeout_seconds)
        except BaseException:  # of a signal's handler: what was read by then is lost, and the writer is asked for it
            self._node.ask_again()
            raise

    def _hear_writer(self, timeout_seconds: float) -> None:
        try:
            reports = self._node.reports(timeout_seconds)
            reports += self._node.ask_for_ends(self.pending.values())
        except WriterLost as error:
            self.alarm(f"{error}; a new one will look at what it left")
            return
        except CheckpointError as error:  # it refuses us
            self.alarm(f"{error}")
            return
        for report in reports:
            self._hear(report)

    def learn(self) -> None:
        """Learn, on other ranks than 0, how saves ended from rank 0, and what our own writer has to complain about."""
        for number in list(self.pending):
            self.end(number, self._results.read(number))
        self.poll(0.0)

    def follow(self, timeout_seconds: float) -> None:
        """Wait, on another rank than 0, for its oldest save. When rank 0 is gone, the store knows how that ended."""
        number, key = next(iter(self.pending.items()))
        # A writer that was lost is started anew here: nobody else waits for what this node has filled.
        self.poll(0.0)
        try:
            self.end(number, self._results.read(number, timeout_seconds))
        except KVStoreLost:
            if not self._is_in_store(key):
                raise
            del self.pending[number]
            self._tell_saved_at_last(key)

    def hear_note(self, note: dict[str, Any]) -> None:
        """Hear, on rank 0, what another rank, or its writer, says about a save: it is void, or is tried again."""
        number = note["number"]
        if note["kind"] == "retrying":
            if number in self.pending and number not in self._retrying:
                self._events.emit(CheckpointEvent("stalled", self.pending[number], f"is tried again: {note['why']}"))
            self._retrying.add(number)
        elif number in self.pending:
            self.guard(partial(self._drop, self.pending[number], note["why"]))
            self.end(number, {"failed": note["why"]})

    def is_last_stored_now(self) -> bool:
        """Tell whether the last save is in the store though it had failed: its writer goes on trying."""
        with contextlib.suppress(CheckpointError):
            return self.last is not None and self._is_in_store(self.last)
        return False

    # ---- what is told

    def leave_note(self, note: dict[str, Any]) -> None:
        """Tell rank 0 something, which it hears when it next looks; without waiting."""
        self._kv_store.leave(f"n/{self._kv_store.count('notes', 1)}", note)

    def void(self, key: Key, why: str, replan: bool) -> None:
        """Tell all that this rank cannot complete a save; training goes on.

        Args:
            key: Of the save.
            why: For a person.
            replan: Whether the next save needs a plan made anew.
        """
        number = self.find_number(key)
        if number is not None:
            # The note first: rank 0 may hear of the failure from its writer at once, and is to know then what to do.
            self.leave_note({"kind": "void", "number": number, "why": why, "replan": replan})
        self.guard(partial(self._drop, key, why))

    def void_on_all(self, number: int, key: Key, why: str) -> None:
        """End a save that is void on all ranks, which all know: nobody needs to tell the others.

        Nothing has the step that rank 0 gave it, so that steps before it are as new as they were.

        Args:
            number: Of the save, which is the last one that was begun.
            key: The one that rank 0 gave it, which may not be this rank's.
            why: For a person.
        """
        if number in self.pending:
            self.pending[number] = key
        self.last = self._before_last  # the same on all ranks: they decide by it whether a step is new
        self.guard(partial(self._drop, key, why))
        self.end(number, {"failed": why})

    def end(self, number: int, result: dict[str, Any] | None) -> None:
        """Note how a save ended, which rank 0 tells the others; do nothing where that is not known (None)."""
        if result is None or number not in self.pending:
            return
        key = self.pending[number]
        if self._leads:
            self._results.leave(number, result)  # first: a signal's handler may interrupt us, and others wait for it
        del self.pending[number]
        self._node.forget(key)
        is_newest, self._newest_ended = number > self._newest_ended, max(number, self._newest_ended)
        self._retrying.discard(number)
        self._results.mark_read(min(self.pending, default=self.number + 1) - 1)
        if "failed" in result:
            self._metrics.failed += 1
            if is_newest:  # an end may be heard after that of a later one
                self.failure = f"step {key.step} was not saved: {result['failed']}"
            self._events.emit(CheckpointEvent("failed", key, result["failed"]))
            return
        figures = result["saved"]
        if is_newest:
            self.failure = None
        self._metrics.saved += 1
        self._metrics.saved_at = figures["at"]
        self._metrics.bytes = figures["bytes"]
        details = {"bytes": figures["bytes"]}
        if figures["seconds"] is not None:  # None: by a writer that was lost
            self._metrics.duration = self._trigger.duration = figures["seconds"]
            self._metrics.bandwidth = figures["bytes"] / max(figures["seconds"], 1e-9)
            details["seconds"] = round(figures["seconds"], 3)
        if self._metrics.newest_stall is not None:
            details["stall_seconds"] = round(self._metrics.newest_stall, 3)
        self._events.emit(CheckpointEvent("saved", key, "", details))

    def alarm(self, why: str) -> None:
        """Tell the user of something that may hold up saves."""
        self._events.emit(CheckpointEvent("stalled", None, why))

    def guard(self, work: Callable[[], Any]) -> None:
        """Do something that may fail because the writer is gone: that is told, and training goes on."""
        try:
            work()
        except (CheckpointError, OSError) as error:
            raise_interruption(error)
            self.alarm(str(error))

    def _hear(self, report: dict[str, Any]) -> None:
        key = Key.parse(report["key"])
        number = self.find_number(key)
        if report["event"] == "stalled":
            self._events.emit(CheckpointEvent("stalled", key, report["why"], {"seconds": report["seconds"]}))
        elif report["event"] == "retrying" and number is not None:
            self._events.emit(
                CheckpointEvent("stalled", key, f"is tried again: {report['why']}", {"seconds": report["seconds"]})
            )
            if self._leads:
                self._retrying.add(number)
            else:
                self.leave_note({"kind": "retrying", "number": number, "why": report["why"]})
        elif report["event"] == "failed" and number is not None:
            if self._leads:
                self.end(number, {"failed": report["why"]})
            else:
                self.leave_note({"kind": "void", "number": number, "why": report["why"], "replan": False})
        elif report["event"] == "saved" and number is not None and self._leads:
            self.end(number, {"saved": report})
        elif report["event"] == "saved" and key == self.last and self._leads and self.failure is not None:
            self._tell_saved_at_last(key)
        elif report["event"] == "copy_failed":
            self._events.emit(CheckpointEvent("copy_failed", key, report["why"]))
        elif report["event"] == "untidy":
            _log.warning("retention after %s: %s", key, report["why"])

    def _tell_saved_at_last(self, key: Key) -> None:
        self.failure = None
        self._metrics.saved += 1
        self._events.emit(CheckpointEvent("saved", key))

    def _is_in_store(self, key: Key) -> bool:
        config = self._node.config
        return any(open_store(config.url, **config.options).list(key.manifest_name))
