"""Has a rank write its Python stacks to its standard error, by a signal that the rank has offered for that.

The library registers faulthandler for the signal and says so with its progress. A signal that nobody handles kills a
process, so it is sent only to one that has a handler for it now.
"""

from __future__ import annotations

import os
from typing import Optional

from everstep.agent.system.process_table import read_parents
from everstep.agent.system.signal_targets import read_signal_masks

StackDump = Optional["tuple[int, int]"]  # a signal, and the process that handles it
_REAL_TIME = range(34, 65)  # no program has them for anything else


def request_stacks(rank: int, offered: StackDump) -> bool:
    """Send the signal that a rank has offered.

    Args:
        rank: PID of the rank's first process.
        offered: The signal and the process; None if it has offered none.

    Returns:
        Whether it was sent: to the rank or a process below it, which handles it.
    """
    if offered is None or offered[0] not in _REAL_TIME:
        return False
    number, pid = offered
    if not _is_below(pid, rank) or not read_signal_masks(pid).get("SigCgt", 0) & 1 << (number - 1):
        return False
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def _is_below(pid: int, ancestor: int) -> bool:
    parents = read_parents()
    seen: set[int] = set()
    while pid not in seen and pid > 1:
        if pid == ancestor:
            return True
        seen.add(pid)
        pid = parents.get(pid, 0)
    return False
