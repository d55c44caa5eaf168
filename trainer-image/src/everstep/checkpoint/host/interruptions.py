"""Tell what a signal's handler has raised from a failure of what it interrupts: the script waits for the former."""

from __future__ import annotations

import inspect
import traceback
from itertools import pairwise
from types import FrameType
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
    each: BaseException | None = error
    seen = set[int]()  # an error that is kept and raised once more may be the cause of its own cause
    # Not its context: the script may save while it handles what a handler has raised before.
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        is_raised_there = any(_is_of_handler(frame) for frame, _ in traceback.walk_tb(each.__traceback__))
        if is_raised_there and not isinstance(each, CheckpointError):
            return each
        each = each.__cause__
    return None


def raise_interruption(error: BaseException) -> None:
    """Raise what find_interruption() returns, if anything."""
    if (interruption := find_interruption(error)) is not None:
        raise interruption


def _is_of_handler(frame: FrameType) -> bool:
    """Tell whether a function was called as a handler is: with a signal's number, and the frame that it interrupts.

    Which handler a signal has does not tell: one that is to run once has put another one in its place by now.
    """
    code = frame.f_code
    given: list[Any] = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        given += frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return any(isinstance(one, int) and isinstance(other, FrameType) for one, other in pairwise(given))
