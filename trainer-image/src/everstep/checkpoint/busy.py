"""A session does one thing at a time: who calls it from within one of its own calls is told, and waits for nobody."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from everstep.checkpoint.errors import CheckpointError

Method = TypeVar("Method", bound=Callable[..., Any])

_DOING = "_call_that_goes_on"  # the attribute of a session: the name of a call and the thread that is in it


def one_at_a_time(method: Method) -> Method:
    """Return a method of a session that may not be called while it, or another such method, goes on.

    No lock: who comes second would wait for itself, or for ranks that do not come to what it calls.

    Raises:
        CheckpointError: When the method is called in spite of that, with the names of both.
    """
    call = f"{method.__name__}()"

    @functools.wraps(method)
    def called(self: object, /, *args: Any, **kwargs: Any) -> Any:
        doing: tuple[str, int] | None = getattr(self, _DOING, None)
        if doing is not None:
            other, thread = doing
            who = (
                "a callback of an event, a state_dict(), a function for metadata or a signal's handler may not do that"
                if thread == threading.get_ident()
                else "another thread may not do that"
            )
            raise CheckpointError(
                f"{call} is called while {other} of the same session goes on: {who}. Call request(), which asks for a "
                f"save at the next step, or call {call} after that has returned"
            )
        setattr(self, _DOING, (call, threading.get_ident()))
        try:
            return method(self, *args, **kwargs)
        finally:
            setattr(self, _DOING, None)

    return cast("Method", called)
