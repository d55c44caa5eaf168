"""Parts of a request for a save that comes from another process: its time, by whichever clock, and a pause after it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from everstep.checkpoint.save.outcomes import SaveFailed
from everstep.progress import report_checkpoint

HOLD_SECONDS = 15.0  # from the commit until ranks are stopped, which takes a few; else their node stays after all
_PAUSE = 0.05  # seconds between two looks of a signal's handler at what it may do


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


def hold_training(wait: Callable[[float], None], seconds: float) -> None:
    """Train no further after a save for a node that goes away: whoever asked for it stops the ranks once it is
    committed, and what they trained meanwhile would be lost.

    A save that fails, or is not committed in time, holds nobody any longer; nor does a stop that does not come.

    Args:
        wait: Waits for so many seconds until what was saved is in the store, or raises SaveFailed.
        seconds: Left until the save is of no use any more.
    """
    report_checkpoint(phase="checkpoint")  # else it would look like a hang
    with contextlib.suppress(SaveFailed):
        wait(seconds)
        until = time.monotonic() + HOLD_SECONDS
        while time.monotonic() < until:
            time.sleep(_PAUSE)
    report_checkpoint(phase="train")
