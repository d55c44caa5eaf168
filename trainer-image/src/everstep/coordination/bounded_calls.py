"""Give up calls that may block for ever, as those of torch's TCPStore do whose host was stopped."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_BRIEF = 1.0  # seconds

_Calls = queue.SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]


class CallFailed(RuntimeError):
    """A call has failed, or did not end in time.

    An error of its own: while a call is waited for, a signal's handler may raise any other, as a TimeoutError.
    """


class BoundedCalls:
    """Runs calls one after the other in a thread, and waits for each only so long; signals are handled meanwhile.

    Once one has taken too long, none is made any more: it may still be there.

    Args:
        limit_seconds: How long a call may take.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._is_stuck = False
        self._calls: _Calls | None = None  # of the thread, which begins with the first one

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a call. Where no thread can be started it is made at once.

        Raises:
            CallFailed: It has raised a RuntimeError or a TimeoutError, or it, or one before it, did not end in time.
            Exception: Whatever else it raises.
        """
        if self._is_stuck:
            raise CallFailed(f"a call before did not end in {self._limit:g} s")
        if self._calls is None:
            try:
                self._calls, thread = _start_thread()
            except RuntimeError:
                return _make_call(partial(call, *args, **kwargs))
            weakref.finalize(self, _end_thread, self._calls, thread)
        done: Future[T] = Future()
        self._calls.put((partial(call, *args, **kwargs), done))
        wait([done], self._limit)
        if not done.done():
            self._is_stuck = True
            raise CallFailed(f"no answer in {self._limit:g} s")
        return done.result()


def _make_call(call: Callable[[], T]) -> T:
    try:
        return call()
    except (RuntimeError, TimeoutError) as error:
        raise CallFailed(f"{error}") from error


def _start_thread() -> tuple[_Calls, threading.Thread]:
    calls: _Calls = queue.SimpleQueue()
    thread = threading.Thread(target=_work, args=(calls,), name="everstep-kv-store", daemon=True)
    thread.start()
    return calls, thread


def _end_thread(calls: _Calls, thread: threading.Thread) -> None:
    calls.put(None)
    if thread is not threading.current_thread():
        thread.join(_BRIEF)  # it may be stuck


def _work(calls: _Calls) -> None:
    while (each := calls.get()) is not None:
        call, done = each
        try:
            done.set_result(_make_call(call))
        except BaseException as error:  # it is raised where the result is waited for
            done.set_exception(error)
        del each, call, done
