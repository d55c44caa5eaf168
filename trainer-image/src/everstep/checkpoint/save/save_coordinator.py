"""Coordinate saves: rank 0 decides when to save, all ranks follow, and all learn how each save ended."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.events import CheckpointEvent, Events, Metrics
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.host.interruptions import find_interruption, raise_interruption
from everstep.checkpoint.save.forecast import Forecast
from everstep.checkpoint.save.outcomes import SaveFailed, SaveOutcomes
from everstep.checkpoint.save.outside_requests import SaveRequest, hold_training
from everstep.checkpoint.save.same_step import StepsDiffer
from everstep.checkpoint.save.saver import Saver, WriterConnection
from everstep.checkpoint.save.session_end import SessionEnd, tell_unmet_request
from everstep.checkpoint.save.step_agreement import Agreement, NotAsked, SaveDecision
from everstep.checkpoint.save.trigger import Trigger
from everstep.checkpoint.writer.control import WriterLost
from everstep.coordination.kv_store import KVStore
from everstep.progress import reporting_checkpoint_phase

_log = logging.getLogger("everstep.checkpoint")

Policy = Literal["skip", "wait", "queue"]

_POLL = 1.0  # seconds
_POLL_COPY = 0.005  # seconds, while a GPU copies what others wait for
_TELL = 30.0  # seconds that rank 0 may take before that is told, and told again
_MARGIN = 1.2  # a store is not always as fast as it was


@dataclass
class SaveCoordinator:
    """One rank's session between its restore and its end. Single-threaded."""

    saver: Saver
    node: WriterConnection
    agreement: Agreement
    kv_store: KVStore
    trigger: Trigger
    attempt: Attempt
    events: Events
    metrics: Metrics
    policy: Policy
    timeout: float
    commit_timeout: float
    is_stopped: Callable[[], bool]

    def __post_init__(self) -> None:
        self._outcomes = SaveOutcomes(
            self.node,
            self.kv_store,
            self.agreement.leads,
            self.trigger,
            self.events,
            self.metrics,
            drop=lambda key, why: self.saver.drop(key, why),  # the saver changes: see go_on()
        )
        # The plan made before the first step will not do: that step gives most optimizers their state.
        self._planned = False
        self._explicit = 0
        self._notes = 0  # read so far
        self._looked = time.monotonic()  # when notes were counted last
        # All deadlines are by the monotonic clock of the rank that keeps them: others may be hours away, or jump.
        self._asked: SaveRequest | None = None  # what ranks have asked for
        self._dropped = ""  # why that was dropped, until all are told
        self._replan = False  # rank 0: the next save needs a plan made anew
        self._wish: SaveRequest | None = None  # this rank's own request, not told yet
        self._requested: tuple[int, SaveRequest] | None = None  # the script's until it is met, and since which step
        self._step = -1  # the last one that was made
        self._is_told_to_end = False  # a save had a deadline: this process may be killed after that
        self._told_not_new: Key | None = None  # the newest save, if steps before it were told of
        self._end = SessionEnd(self.node, self.agreement, self._outcomes)
        self._told = 0.0  # seconds that rank 0 had taken for a decision when that was told last

    @property
    def newest_step(self) -> int | None:
        """Return the step of the newest save that was begun; None before the first."""
        return None if self._outcomes.last is None else self._outcomes.last.step

    def go_on(self, saver: Saver, step: int | None) -> None:
        """Other objects are saved from here on; all ranks say so together. `step`: that training goes on from, where
        it was just restored."""
        self._finish_copy(self.timeout)  # of the objects until now
        self.saver.close()
        self.saver, self._planned = saver, False
        void = self.agreement.restart()
        if step is not None:
            self.trigger.start(step, time.monotonic())
        elif void is not None and void.save:
            hold_until = time.monotonic() + void.hold if void.hold > 0 else None
            self._asked = SaveRequest(void.deadline, hold_until).join(self._asked)  # it is still due

    # ---- every step

    def step(self, step: int) -> None:
        """See Checkpointer.step."""
        self._step = step
        self._tell_not_new(step)
        self._finish_copy()
        if self._wish is not None:
            wish, self._wish = self._wish, None
            self._outcomes.leave_note(wish.write_note())
        decision = self.agreement.arrive(step, self._choose, self._waiting)
        if decision is not None:
            if decision.dropped:
                self._hear_dropped(decision.dropped)
            # The script may have saved it itself since this was decided. By the step that all ranks know: alike on all.
            if decision.save and self._is_new(decision.step):
                if not self._take(step, decision.step, decision.replan):
                    self.agreement.restart()  # the next boundary was counted from a step that is not that of all
                elif decision.hold > 0:
                    hold_training(self._wait, decision.hold, self.is_stopped)
            if not self.agreement.leads:
                self._outcomes.learn()
        self.agreement.prepare(step, self._choose_early)

    def save(self, step: int, deadline: float | None) -> Forecast:
        """See Checkpointer.save."""
        self._explicit += 1
        self._is_told_to_end |= deadline is not None
        self._tell_not_new(step)
        told = self.agreement.answer(self._explicit, lambda: self._forecast(step, deadline), self._waiting)
        saves = told["saves"] and self._take(step, told["step"], told["replan"])
        if not self.agreement.leads:
            self._outcomes.learn()
        return Forecast(saves, told["seconds"])

    def request(self, deadline: float | None) -> None:
        """See Checkpointer.request."""
        self._is_told_to_end |= deadline is not None
        request = SaveRequest.make(deadline)
        self._requested = (self._step, request.join(None if self._requested is None else self._requested[1]))
        self.ask(request)

    def ask(self, request: SaveRequest) -> None:
        """Ask for a save at the next boundary, of which nobody is told where none comes any more."""
        self._wish = request.join(self._wish)

    def wait(self, timeout: float | None) -> None:
        """See Checkpointer.wait."""
        with reporting_checkpoint_phase() if self._outcomes.pending else contextlib.nullcontext():
            self._wait(timeout)

    def _wait(self, timeout: float | None) -> None:
        limit = self._limit if timeout is None else timeout
        until = time.monotonic() + limit
        outcomes = self._outcomes
        while outcomes.pending and (left := until - time.monotonic()) > 0:
            pause = min(self._finish_copy() or _POLL, left)
            if self.agreement.leads:
                outcomes.poll(pause)
                self._read_notes()
            else:
                outcomes.follow(pause)
        if outcomes.pending:
            raise SaveFailed(f"not in the store after {limit:g} s: {', '.join(map(str, outcomes.pending.values()))}")
        if outcomes.failure is not None and not outcomes.is_last_stored_now():
            raise SaveFailed(outcomes.failure)

    def close(self, wait: bool) -> None:
        """The end of the session; without `wait` it is left at once, and the writer goes on alone."""
        requested, self._requested = self._requested, None
        try:
            if wait:
                self._end.leave_in_order(
                    self.wait, self._read_notes, self.saver.world, timeout=self.timeout, limit=self._limit
                )
                if not self._is_told_to_end and sys.exc_info()[0] is None:  # of sys.exit(), by a handler perhaps
                    self._end.wait_until_tidy()
                    self.saver.close()  # the memory of a file that is mapped is not free
                    self._end.wait_until_memory_is_free()
            else:
                self._end.leave_briefly()
        finally:
            if requested is not None:
                tell_unmet_request(self.events, requested[1].until, wait)

    @property
    def _limit(self) -> float:
        """Return the seconds that a save may take until all ranks know that it is in the store."""
        return self.commit_timeout + self.timeout

    # ---- rank 0's choices

    def _choose_early(self, step: int, ahead: int) -> SaveDecision | None:
        """Return the choice about the next step, one step before.

        None where a save is due and an earlier one is still being stored: it may be done when that step is made, and
        training goes on until then. Nor is anything waited for here: a rank that trains meanwhile would wait for this
        one, and could not say that its GPU has copied its part.
        """
        self._outcomes.poll(0.0)
        self._read_notes()
        if self._outcomes.in_the_way and (self.trigger.due(step, time.monotonic()) or self._asked or self._replan):
            return None
        return self._choose(step, ahead)

    def _choose(self, step: int, ahead: int) -> SaveDecision:
        """Decide what happens at the boundary that is reached with this step."""
        now = time.monotonic()
        self._outcomes.poll(0.0)
        self._read_notes()
        save, deadline, hold = False, None, 0.0
        due = self.trigger.due(step, now)
        self._drop_what_is_too_late()
        if self._is_wanted(due) and self._may_begin(step, due):
            self._drop_what_is_too_late()  # an earlier save may have been waited for
            save = self._is_wanted(due)
        if save:
            if self._asked is not None:
                deadline, until = self._asked.until, self._asked.hold_until
                hold = 0.0 if until is None else max(0.0, until - time.monotonic())
            self._asked = None
            self.trigger.start(step, now)
        following = step + max(1, ahead)
        limit = self.trigger.limit(step)
        decision = SaveDecision(
            save=save,
            next=following if limit is None else min(following, limit),
            replan=save and self._replan,
            deadline=deadline,
            hold=hold,
            dropped=self._dropped,
        )
        self._dropped = ""
        return decision

    def _is_wanted(self, due: bool) -> bool:
        return due or self._asked is not None or self._replan

    def _may_begin(self, step: int, due: bool) -> bool:
        if not self._is_new(step):
            return False
        if not self._outcomes.in_the_way or (self.policy == "queue" and len(self._outcomes.in_the_way) < 2):
            return True
        if self.policy != "skip":
            # For what was asked for alone training waits as long as that is of use.
            until = None if due or self._replan or self._asked is None else self._asked.until
            at_most = 0 if self.policy == "wait" else 1
            self._finish_pending(None if until is None else until - time.monotonic(), at_most)
            return len(self._outcomes.in_the_way) <= at_most
        if due:
            self.metrics.skipped += 1
            self.trigger.start(step, time.monotonic())
            waiting = self._outcomes.in_the_way[0]
            self.events.emit(CheckpointEvent("stalled", waiting, "is still being stored: the next save is skipped"))
        return False

    def _drop_what_is_too_late(self) -> None:
        """A save that was asked for waits for one that is being stored while training goes on; until its deadline."""
        if self._asked is None or self._asked.until is None:
            return
        left, seconds = self._asked.until - time.monotonic(), self._seconds
        if (seconds or 0.0) * _MARGIN > left:
            self._asked = None
            needs = "" if seconds is None else f": it would take {seconds:.3g} s"
            self._dropped = f"the save that was asked for cannot be stored in the {max(0.0, left):.3g} s left{needs}"

    def _hear_dropped(self, why: str) -> None:
        """Note, on all ranks, that what one of them had asked for is not begun."""
        if self._wish is None:  # else it has asked again, and is not told of that one yet
            self._requested = None
        self._outcomes.alarm(why)

    @property
    def _seconds(self) -> float | None:
        """Return how many seconds a save that began now would take to be in the store, as measured; None if unknown."""
        if not self.metrics.bandwidth:
            return None
        # What is being stored comes first.
        return (1 + len(self._outcomes.in_the_way)) * self.saver.bytes / self.metrics.bandwidth + (
            self.trigger.cost or 0.0
        )

    def _is_new(self, step: int) -> bool:
        """Tell whether nothing was saved under this step or a later one; the same on all ranks.

        A second save under one key would void the first.
        """
        return self._outcomes.last is None or step > self._outcomes.last.step

    def _tell_not_new(self, step: int) -> None:
        """Tell once that steps have gone back, and that nothing is saved until they have come up again."""
        last = self._outcomes.last
        if last is None or step >= last.step or last == self._told_not_new:
            return
        self._told_not_new = last
        self._outcomes.alarm(
            f"step {step} comes before step {last.step}, which was saved: nothing is saved until a later step than "
            "that. Count steps over all epochs"
        )

    def _forecast(self, step: int, deadline: float | None) -> dict[str, Any]:
        began = time.monotonic()
        seconds = self._seconds
        fits = deadline is None or seconds is None or seconds * _MARGIN <= deadline
        fits = fits and self._is_new(step)
        if fits and self._outcomes.in_the_way:
            self._finish_pending(self.commit_timeout if deadline is None else deadline)
            fits = not self._outcomes.in_the_way and (deadline is None or time.monotonic() - began < deadline)
        told = {"saves": fits, "step": step, "seconds": seconds, "replan": fits and self._replan}
        if fits:
            self.trigger.start(step, time.monotonic())
        return told

    def _finish_pending(self, timeout: float | None = None, at_most: int = 0) -> None:
        """Wait until no more than `at_most` saves are being stored."""
        until = time.monotonic() + (self.commit_timeout if timeout is None else timeout)
        if len(self._outcomes.in_the_way) <= at_most:
            return
        with reporting_checkpoint_phase():
            while len(self._outcomes.in_the_way) > at_most and (left := until - time.monotonic()) > 0:
                self.agreement.busy()  # others wait for a decision meanwhile, and a store may take its time
                self._outcomes.poll(min(self._finish_copy() or _POLL, left))
                self._read_notes()

    def _read_notes(self) -> None:
        """Read the notes of other ranks."""
        looked, self._looked = self._looked, time.monotonic()
        there = self.kv_store.count("notes")
        while self._notes < there:
            name = f"n/{self._notes + 1}"
            note = self.kv_store.read(name, 5.0) or {"kind": ""}  # it is counted before it is left
            if note["kind"] == "asked":
                self._asked = SaveRequest.read_note(note, looked).join(self._asked)
            elif note["kind"] == "ended":
                self._end.ended.add(note["rank"])
            elif note["kind"]:
                self._replan |= note.get("replan", False)
                self._outcomes.hear_note(note)
            # Only now: a signal's handler may interrupt us before, and to hear a note twice does no harm.
            self._notes += 1
            self.kv_store.remove(name)

    # ---- a save

    def _take(self, step: int, told_step: int, replan: bool) -> bool:
        """Begin a save; whether all ranks save the same step, else nothing is saved.

        Args:
            step: That this rank saves.
            told_step: That rank 0 said.
            replan: Whether rank 0 asks for a plan made anew.
        """
        began = time.perf_counter()
        key = Key(self.attempt, step)
        number = self._outcomes.begin(key)
        if self._requested is not None and step >= self._requested[0]:
            self._requested = None
        was_planned, plans = self._planned, replan or not self._planned  # alike on all ranks
        self._planned = True
        if plans:  # only now: after the decision that says so, a script may save by itself, by a plan made anew too
            self._replan = False
        try:
            # They tell each other their steps while they plan.
            self.saver.take(key, plans or self._has_outgrown_plan(number, key, may_differ=step != told_step))
        except StepsDiffer as error:
            self._planned = was_planned
            self._replan |= replan
            self._outcomes.void_on_all(number, Key(self.attempt, told_step), f"{error}")
            return False
        except BaseException as error:  # training goes on; the others are told that this save is void
            interruption = find_interruption(error)
            level = logging.INFO if isinstance(error, CheckpointError) else logging.ERROR  # an event tells the user
            if interruption is None:
                _log.log(level, "%s was not taken: %s", key, error, exc_info=level == logging.ERROR)
            why = f"{error}" if interruption is None else f"it was interrupted by {type(interruption).__name__}"
            self._outcomes.void(key, why, plans)  # a plan that could not be made is of no use to the next either
            if interruption is not None:  # as from a signal's handler; the session may end now, or go on
                raise interruption  # noqa: B904 - it is the error, or its cause
        took = time.perf_counter() - began
        self.metrics.stalled(took)
        self.trigger.cost = self.metrics.stalls[-1] if self.metrics.stalls else took
        return True

    def _has_outgrown_plan(self, number: int, key: Key, may_differ: bool) -> bool:
        """Begin a save by the plan that is there; whether the state of any rank has grown out of it since.

        All ranks make a new plan then, also one that cannot take its state: it tells the others while they plan. So
        they do where a rank `may_differ` from the others in its step: that begins nothing before it knows.
        """
        fits, failure = not may_differ, None
        try:
            fits = fits and self.saver.begin(key)
        except Exception as error:
            raise_interruption(error)
            failure = error
            self._outcomes.void(key, f"{error}", replan=False)  # before all have come: who comes waits for nobody
        try:
            has_outgrown = self.agreement.ask_all(
                number, not fits, self._waiting_for_ranks, lambda: self._find_end(number)
            )
        except NotAsked as error:
            raise failure or error from error
        if failure is not None and not has_outgrown:
            raise failure
        return has_outgrown

    def _find_end(self, number: int) -> str | None:
        """Rank 0, while it waits for the others at a save: why that has failed by now, so that they will not come."""
        self._outcomes.poll(0.0)
        self._read_notes()
        if number not in self._outcomes.pending:
            return self._outcomes.failure or "it has failed"
        if self._end.ended:
            ranks = ", ".join(map(str, sorted(self._end.ended)))
            return f"rank {ranks} had ended its session before this save: call save() and step() equally often on all"
        return None

    def _waiting_for_ranks(self, seconds: float) -> float:
        """Another rank than 0, at a save: what its own writer says is passed on to rank 0, which may wait for it."""
        self._outcomes.poll(0.0)
        return _POLL

    def _finish_copy(self, timeout_seconds: float = 0.0) -> float | None:
        """Announce what a GPU has copied by now; a copy that fails makes its save void, and training goes on.

        Return how long to wait until the next look, None when nothing is copied.
        """
        if (key := self.saver.copying) is None:
            return None
        try:
            return None if self.saver.finish_copy(timeout_seconds) else _POLL_COPY
        except WriterLost as error:
            self._outcomes.alarm(str(error))  # a new one finds in the slot what was not announced
        except (CheckpointError, OSError) as error:
            raise_interruption(error)
            self._outcomes.void(key, f"{error}", replan=False)
        return None

    # ---- words

    def _waiting(self, seconds: float) -> float | None:
        """While rank 0 decides: it may wait for a save of which this rank still copies its part."""
        pause = self._finish_copy()
        if seconds >= self._told + _TELL:
            self._told = seconds
            figures = {"seconds": round(seconds)}
            self.events.emit(CheckpointEvent("stalled", None, "rank 0 has not decided whether to save", figures))
        elif seconds < self._told:
            self._told = 0.0  # it waits for something else by now
        return pause
