"""A request for a save, as one rank or another process has it: its time, by whichever clock, and a pause after it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint.save.outcomes import SaveFailed
from everstep.progress import reporting_checkpoint_phase

HOLD_SECONDS = 15.0  # from the commit until ranks are stopped, which takes a few; else their node stays after all
_PAUSE = 0.05  # seconds between two looks of a signal's handler at what it may do


@dataclass(frozen=True)
class SaveRequest:
    """A save that was asked for and is not begun yet. Times are of this process's monotonic clock.

    Attributes:
        until: When it is of no use any more; None: it has no limit.
        hold_until: Until when training holds after it at most (see hold_training); None: it goes on.
    """

    until: float | None
    hold_until: float | None = None

    @classmethod
    def make(cls, seconds: float | None, *, holds: bool = False) -> SaveRequest:
        """Return a request of which so many seconds are left; None: it has no limit."""
        until = None if seconds is None else time.monotonic() + seconds
        return cls(until, until if holds else None)

    def join(self, earlier: SaveRequest | None) -> SaveRequest:
        """Return what one save does for this request and an earlier one: neither is dropped before its time."""
        if earlier is None:
            return self
        until = None if self.until is None or earlier.until is None else max(self.until, earlier.until)
        holds = [each for each in (self.hold_until, earlier.hold_until) if each is not None]
        return SaveRequest(until, max(holds, default=None))

    def write_note(self) -> dict[str, Any]:
        """Return what tells it to another rank, which may have another clock."""
        now = time.monotonic()
        seconds, hold = (None if until is None else until - now for until in (self.until, self.hold_until))
        return {"kind": "asked", "seconds": seconds, "hold": hold, "at": time.time()}

    @classmethod
    def read_note(cls, note: Mapping[str, Any], looked: float) -> SaveRequest:
        """Return what write_note() tells. `looked`: see find_deadline()."""
        return cls(*(find_deadline(note[each], note["at"], looked) for each in ("seconds", "hold")))


def find_deadline(seconds: float | None, told_at: float, looked: float) -> float | None:
    """Return by our clock when the time of a rank is over that had so many `seconds` left.

    Args:
        seconds: What that rank had left; None: it has no limit.
        told_at: When its note began its way, by that rank's clock, which may be any.
        looked: When we looked for notes before, without finding it: it was not on its way for longer.
    """
    if seconds is None:
        return None
    now = time.monotonic()
    return now + seconds - min(max(0.0, time.time() - told_at), now - looked)


def hold_training(wait: Callable[[float], None], seconds: float, is_over: Callable[[], bool]) -> None:
    """Train no further after a save for a node that goes away: whoever asked for it stops the ranks once it is
    committed, and what they trained meanwhile would be lost.

    A save that fails, or is not committed in time, holds nobody any longer; nor does a stop that does not come.

    Args:
        wait: Waits for so many seconds until what was saved is in the store, or raises SaveFailed.
        seconds: Left until the save is of no use any more.
        is_over: Tells that the ranks are being stopped: a handler that only makes a note of it lets training go on to
            its end, for which nobody should wait.
    """
    is_over()  # whether this rank's node had the request at all, is seen now
    with reporting_checkpoint_phase(), contextlib.suppress(SaveFailed):
        wait(seconds)
        until = time.monotonic() + HOLD_SECONDS
        while time.monotonic() < until and not is_over():
            time.sleep(_PAUSE)
