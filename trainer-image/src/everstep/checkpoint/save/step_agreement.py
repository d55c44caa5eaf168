"""All ranks save at the same step, and none of them waits for the others at any other.

At a save they tell each other whether the plan still is that of their states (ask_all), so that it is made anew by all
or by none.

Decisions are numbered. Decision *i* is made by rank 0 one step before its boundary and left in the store; every rank
reads it when it reaches the boundary, and learns there which step the next boundary is (about a second of steps later).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from everstep.checkpoint.errors import AgreementLost, CheckpointError
from everstep.coordination.kv_store import KVStore
from everstep.coordination.message_series import MessageSeries

PERIOD = 1.0  # seconds between two boundaries
MOST_CALLS = 100  # between two boundaries: a run that slows down suddenly still asks soon

_STRIDES = 4  # that are looked at: calls after which a longer stride is believed
_LOOK = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02  # seconds, while rank 0 waits for the other ranks
_ENDED = "ended"  # what rank 0 leaves when it takes part in nothing more


class NotAsked(CheckpointError):
    """Raised when not all ranks have come to a save."""


@dataclass(frozen=True)
class SaveDecision:
    """The same on all ranks: what they do at a boundary.

    `save`: at this boundary. `next`: the step of the next one. `replan`: make the plan anew first. `deadline`: the save
    is of no use after it (rank 0's monotonic clock). `step`: that it was made for; all ranks know it, and only a rank
    that comes to the boundary with another one has reason to ask where the others are. `hold`: seconds for which
    training holds after the save, until it is committed, at most; 0: it goes on. `dropped`: why a save that was asked
    for is not begun.
    """

    save: bool
    next: int
    replan: bool = False
    deadline: float | None = None
    step: int = -1
    dropped: str = ""
    hold: float = 0.0


class Pace:
    """The distance between a run's steps, in steps and in seconds."""

    def __init__(self) -> None:
        self._strides = deque([1], maxlen=_STRIDES)
        self._seconds: float | None = None  # from one call to the next, without saves
        self._last: tuple[int, float] | None = None
        self.calls = 1  # from one boundary to the next

    def tick(self, step: int, now: float) -> None:
        """Note that a step was made."""
        if self._last is not None and step > self._last[0]:
            self._strides.append(step - self._last[0])
            took = now - self._last[1]
            # Slower counts at once, faster gradually: a boundary that is too early costs one small read.
            self._seconds = took if self._seconds is None or took > self._seconds else 0.7 * self._seconds + 0.3 * took
        self._last = (step, now)

    @property
    def stride(self) -> int:
        """Return the steps from one call to the next: the shortest of the last few.

        A script that skips steps once, at the end of an epoch, is asked again after as many calls as before, not after
        as many jumps.
        """
        return min(self._strides)

    def pause(self, now: float) -> None:
        """Note that a save, not a step, took the time since the last tick."""
        if self._last is not None:
            self._last = (self._last[0], now)

    def ahead(self) -> int:
        """Return how many steps after one boundary the next one is."""
        calls = 1 if self._seconds is None else int(PERIOD / max(self._seconds, 1e-9))
        self.calls = max(1, min(calls, 2 * self.calls, MOST_CALLS))
        return self.calls * self.stride


Choose = Callable[[int, int], SaveDecision]
ChooseEarly = Callable[[int, int], SaveDecision | None]  # None: it is not known before the step is made
Waiting = Callable[[float], float | None]


class Agreement:
    """One rank's view. `patience`: seconds that a rank waits at a boundary without a sign of rank 0."""

    def __init__(self, kv_store: KVStore, rank: int, patience: float) -> None:
        self.boundary = 0
        self._kv_store = kv_store
        self._rank = rank
        self._patience = patience
        self._number = 0
        self._decisions = MessageSeries(kv_store, "d", rank == 0)
        self._answers = MessageSeries(kv_store, "x", rank == 0)
        self._verdicts = MessageSeries(kv_store, "a", rank == 0)
        self._pace = Pace()
        self._made: SaveDecision | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def leads(self) -> bool:
        return self._rank == 0

    def restart(self) -> SaveDecision | None:
        """Make the next step a boundary, which may be any step. All ranks call it, between the same two steps.

        Returns:
            What rank 0 had decided about another boundary, which is void; else None.
        """
        made, self._made = self._made, None
        self.boundary = 0
        self._pass()  # by a number that may be taken
        return made

    def arrive(self, step: int, choose: Choose, waiting: Waiting) -> SaveDecision | None:
        """Return the decision of a boundary that this step has reached; None between boundaries.

        Rank 0 decides through `choose(step, steps ahead)`, here if it could not before. Others call `waiting(seconds)`
        now and then while they wait for it, and again after as many seconds as it returns. AgreementLost.
        """
        if self.leads:
            self._pace.tick(step, time.monotonic())
            if step >= self.boundary and self._made is None:
                self._decide(step, choose)
        if step < self.boundary:
            return None
        decision = (
            self._made if self.leads else SaveDecision(**self._await(self._decisions.get_name(self._number), waiting))
        )
        assert decision is not None
        self._made = None
        self._pass()
        # Where steps have gone back since it was made, what lies ahead does so of the step that was.
        self.boundary = min(decision.next, step + decision.next - decision.step)
        return decision

    def prepare(self, step: int, choose: ChooseEarly) -> None:
        """Rank 0 after its step: decides about the boundary that the next step reaches, if `choose` can tell by now."""
        if self.leads:
            self._pace.pause(time.monotonic())
            if self._made is None and step + self._pace.stride >= self.boundary:
                self._decide(step + self._pace.stride, choose)

    def answer(self, number: int, decide: Callable[[], Any], waiting: Waiting) -> Any:
        """Return rank 0's decision about something that all ranks come to, for the `number`th time; JSON carries it."""
        if self.leads:
            decided = decide()
            self._answers.leave(number, decided)
        else:
            decided = self._await(self._answers.get_name(number), waiting)
        self._answers.mark_read(number)
        return decided

    def end(self) -> None:
        """Take no more part in decisions, on rank 0: whoever waits for a decision need not."""
        if self.leads:
            self._kv_store.leave(_ENDED, True)

    def ask_all(self, number: int, says: bool, waiting: Waiting, find_reason: Callable[[], str | None]) -> bool:
        """Tell whether any rank says so; all ranks ask at the same save, and get the same answer.

        Args:
            number: Of the save.
            says: This rank's word.
            waiting: See arrive().
            find_reason: On rank 0, while it waits for the others: why it need not wait any more, None while it must.

        Raises:
            NotAsked: Not all ranks have come; all that have, or come later, hear the same reason.
            AgreementLost: Rank 0 is gone.
        """
        name = self._verdicts.get_name(number)
        if says:
            self._kv_store.count(f"{name}/yes", 1)
        said = self._kv_store.count(f"{name}/said", 1)
        if not self.leads:
            verdict = self._await(name, waiting)
        else:
            why = self._wait_for_all(name, said, find_reason)
            verdict = {"why": why, "yes": self._kv_store.count(f"{name}/yes") > 0}
            self._verdicts.leave(number, verdict)
            for over in (f"{name}/yes", f"{name}/said"):
                self._kv_store.remove(over)
        self._verdicts.mark_read(number)
        if verdict["why"]:
            raise NotAsked(verdict["why"])
        return bool(verdict["yes"])

    def _wait_for_all(self, name: str, said: int, find_reason: Callable[[], str | None]) -> str | None:
        began, pause = time.monotonic(), _FIRST_PAUSE
        while said < self._kv_store.ranks:
            if (why := find_reason()) is not None:
                return why
            if (waited := time.monotonic() - began) > self._patience:
                missing = self._kv_store.ranks - said
                return f"{missing} of {self._kv_store.ranks} ranks have not come to this save in {waited:.3g} s"
            self.busy()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            said = self._kv_store.count(f"{name}/said")
        return None

    def _decide(self, step: int, choose: ChooseEarly) -> None:
        calls = self._pace.calls
        self._made = choose(step, self._pace.ahead())
        if self._made is None:
            self._pace.calls = calls  # the same boundary is asked about again: the next one is no farther for that
        else:
            self._made = replace(self._made, step=step)
            self._decisions.leave(self._number, asdict(self._made))

    def _pass(self) -> None:
        """Note that this decision is over for this rank."""
        self._decisions.mark_read(self._number)
        self._number += 1

    def busy(self) -> None:
        """Show, on rank 0, now and then while it waits for a store, that it lives: the others' patience begins anew."""
        self._kv_store.count("busy", 1)

    def _await(self, name: str, waiting: Waiting) -> Any:
        began = sign = time.monotonic()
        pause = waiting(0.0) or _LOOK
        signs: int | None = None
        while (waited := time.monotonic() - sign) < self._patience:
            found = self._kv_store.read(name, max(0.001, min(pause, self._patience / 4, self._patience - waited)))
            if found is not None:
                return found
            pause = waiting(time.monotonic() - began) or _LOOK
            if self._kv_store.read(_ENDED) is not None and (found := self._kv_store.read(name)) is None:
                raise AgreementLost(
                    f"rank 0 has ended its session while this rank waits for its decision ({name}): call step() and "
                    "save() equally often on all ranks"
                )
            if found is not None:
                return found
            before, signs = signs, self._kv_store.count("busy")
            if before not in (None, signs):
                sign = time.monotonic()
        raise AgreementLost(f"rank 0 has not decided in {self._patience:g} s whether to save ({name})")
