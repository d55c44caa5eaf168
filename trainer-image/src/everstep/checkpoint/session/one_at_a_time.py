"""A session does one thing at a time, in one process: another call is an error at once, and waits for nobody."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.host.interruptions import raise_interruption

Method = TypeVar("Method", bound=Callable[..., Any])

_DOING = "_call_that_goes_on"  # the attribute of a session: the name of a call and the thread that is in it


class Session(Protocol):
    """An object of whose methods one may go on at a time."""

    def check_call(self, call: str) -> None:
        """Raise CheckpointError where nothing may be called any more, or not from here."""


def check_process(process: int, call: str) -> None:
    """See that a call does not come from a child that was forked from the process of a session.

    Parent and child share one connection to the writer: a word of the child would be taken for the parent's, and the
    parent would wait for answers that the child has read. So it is where a worker of a DataLoader inherits a handler
    of SIGTERM that saves, and torch ends the worker with that signal.

    Args:
        process: The process id of the session.
        call: Which one, for the message.

    Raises:
        CheckpointError: It does.
    """
    if os.getpid() != process:
        raise CheckpointError(
            f"{call} is called in process {os.getpid()}, a child of process {process} that made the session: a session "
            "is its maker's alone. Save there, or make another session, with a store of its own, after the fork"
        )


def one_at_a_time(method: Method) -> Method:
    """Return a method of a session that may not be called while it, or another such method, goes on.

    No lock: who comes second would wait for itself, or for ranks that do not come to what it calls.

    Raises:
        CheckpointError: When the method is called in spite of that, with the names of both.
        Exception: What a signal's handler has raised meanwhile, in place of an error that was made of it.
    """
    call = f"{method.__name__}()"

    @functools.wraps(method)
    def called(self: Session, /, *args: Any, **kwargs: Any) -> Any:
        self.check_call(call)
        doing: tuple[str, int] | None = getattr(self, _DOING, None)
        if doing is not None:
            other, thread = doing
            who = (
                "a callback of an event, a state_dict(), a function for metadata or a signal's handler may not do that"
                if thread == threading.get_ident()
                else "another thread may not do that"
            )
            raise CheckpointError(
                f"{call} is called while {other} of the same session still runs: {who}. Call request(), which asks for "
                f"a save at the next step, or call {call} after that has returned"
            )
        try:  # around this too: a signal's handler may interrupt us right after it
            setattr(self, _DOING, (call, threading.get_ident()))
            return method(self, *args, **kwargs)
        except Exception as error:
            raise_interruption(error)  # who waits for other ranks may have taken it for their silence
            raise
        finally:
            setattr(self, _DOING, None)

    return cast("Method", called)
