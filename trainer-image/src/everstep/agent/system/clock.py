"""A clock for leases: one that no suspended machine can hold back."""

from __future__ import annotations

import time


def read_boottime() -> float:
    """Return seconds of a clock that nobody sets and that goes on while the machine is suspended.

    Python's monotonic clock is CLOCK_MONOTONIC, which stands still in a virtual machine that is suspended: a process
    that wakes after an hour would take its lease for renewed a moment ago, and others have long taken over. Elsewhere
    than on Linux it is the monotonic clock all the same.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
