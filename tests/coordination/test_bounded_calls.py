"""Calls that may block for ever are given up."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

from everstep.coordination.bounded_calls import BoundedCalls, CallFailed


def test_a_call_that_blocks_is_given_up_and_none_is_made_after_it() -> None:
    calls = BoundedCalls(0.01)
    reader, writer = os.pipe()
    with pytest.raises(CallFailed, match="no answer in"):
        calls.run(os.read, reader, 1)
    with pytest.raises(CallFailed, match="a call before did not end"):
        calls.run(os.getpid)
    os.write(writer, b"x")
    for each in (reader, writer):
        os.close(each)


def test_what_a_call_returns_or_raises_comes_back() -> None:
    calls = BoundedCalls(60.0)
    assert calls.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        calls.run(divmod, 7, 0)


@pytest.mark.parametrize("error", [TimeoutError, RuntimeError])
def test_what_a_signals_handler_raises_meanwhile_is_no_failure_of_the_call(error: type[Exception]) -> None:
    """As that of an alarm, by which a script ends before its time is over: other calls are still made."""

    def raise_error(number: int, frame: FrameType | None) -> None:
        if not has_come.is_set():
            has_come.set()
            raise error("the time of the script is over")

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        while not has_come.wait(0.05):  # it came just before the wait, which it does not interrupt then
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    has_come = threading.Event()
    calls = BoundedCalls(60.0)
    before = signal.signal(signal.SIGTERM, raise_error)
    try:
        with pytest.raises(error, match="is over") as raised:
            calls.run(interrupt)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert type(raised.value) is error
    assert calls.run(divmod, 7, 2) == (3, 1)


@pytest.mark.parametrize("error", [TimeoutError, RuntimeError])
def test_a_call_that_fails_says_so(error: type[Exception]) -> None:
    def fail() -> None:
        raise error("connection reset")

    with pytest.raises(CallFailed, match="connection reset"):
        BoundedCalls(60.0).run(fail)
