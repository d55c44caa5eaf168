"""Tell what a signal's handler has raised from a failure of what it interrupts: the script waits for the former."""

from __future__ import annotations

import functools
import signal
import traceback
from types import CodeType
from typing import Any

from everstep.checkpoint.errors import CheckpointError


def find_interruption(error: BaseException) -> BaseException | None:
    """Return what is meant for the script, and not for whoever was at work when it came.

    Args:
        error: What was raised there.

    Returns:
        The error itself where it is no Exception, as SystemExit and KeyboardInterrupt. That of a signal's handler, as a
        TimeoutError of a script whose time is over, where it is this one or its cause; not one of this library, which
        the handler has called. Else None.
    """
    if not isinstance(error, Exception):
        return error
    codes = {_find_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    each: BaseException | None = error
    # Not its context: the script may save while it handles what a handler has raised before.
    while codes and each is not None:
        is_raised_there = any(frame.f_code in codes for frame, _ in traceback.walk_tb(each.__traceback__))
        if is_raised_there and not isinstance(each, CheckpointError):
            return each
        each = each.__cause__
    return None


def raise_interruption(error: BaseException) -> None:
    """Raise what find_interruption() returns, if anything."""
    if (interruption := find_interruption(error)) is not None:
        raise interruption


def _find_code(handler: Any) -> CodeType | None:
    """Return the code that a handler runs; None for one of the system, or of no Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler) or isinstance(handler, int):
        return None
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__func__", type(handler).__call__)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
