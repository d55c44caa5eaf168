"""Sends a signal to a shell with a trap and to what runs in its background, so that everybody hears it once.

Whether a trap passes the signal on, nobody can see. Signals that wait for a process are not counted, though: while it
is stopped, one that the trap sends and one that is sent here are the same. So those in the background stand still until
the trap has sent it to them, the shell has ended, or some time has gone by.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from typing import Callable

from .process_table import read_stat
from .signal_targets import read_signal_masks

HALT_SECONDS = 0.5  # for a stop to take effect, which needs a processor
TRAP_SECONDS = 1.0  # for the trap
_LOOK_SECONDS = 0.005


class TrapRelay:
    """Begins at once, and goes on by itself: whoever has asked for it may be cancelled, and nobody stays stopped."""

    def __init__(self, trapped: Mapping[int, int], signum: int, send: Callable[[int, int], None]) -> None:
        """Stop those in the background, and tell the shells.

        Args:
            trapped: Processes that a trap may send it to, each with its shell.
            signum: The signal.
            send: Sends a signal to a process; those that have ended are left out.
        """
        self._left = dict(trapped)
        self._shells = set(trapped.values()) - trapped.keys()  # one in another's background waits as well
        self._signum = signum
        self._send = send
        self._deadline = time.monotonic() + HALT_SECONDS
        for pid in self._left:
            send(pid, signal.SIGSTOP)
        self._wait_until_stopped()

    def _wait_until_stopped(self) -> None:
        """Tell the shells no sooner: one that is not yet stopped may take the trap's signal, and then another one."""
        if time.monotonic() < self._deadline and not all(map(_stands_still, self._left)):
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._wait_until_stopped)
            return
        for shell in self._shells:
            self._send(shell, self._signum)
        self._deadline = time.monotonic() + TRAP_SECONDS
        self._wait_for_traps()

    def _wait_for_traps(self) -> None:
        for pid, shell in list(self._left.items()):
            if _waits_for(pid, self._signum) or _has_ended(shell) or time.monotonic() > self._deadline:
                self._send(pid, self._signum)
                self._send(pid, signal.SIGCONT)
                del self._left[pid]
        if self._left:
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._wait_for_traps)


def _stands_still(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat[1] in ("T", "t", "Z", "X")


def _has_ended(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat[1] in ("Z", "X")


def _waits_for(pid: int, signum: int) -> bool:
    """Return whether a process has been sent a signal that it has not taken yet."""
    masks = read_signal_masks(pid)
    return bool((masks.get("SigPnd", 0) | masks.get("ShdPnd", 0)) & 1 << (signum - 1))
