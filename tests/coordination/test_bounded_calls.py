"""Calls that may block for ever are given up."""

from __future__ import annotations

import os

import pytest

from everstep.coordination.bounded_calls import BoundedCalls


def test_a_call_that_blocks_is_given_up_and_none_is_made_after_it() -> None:
    calls = BoundedCalls(0.01)
    reader, writer = os.pipe()
    with pytest.raises(TimeoutError, match="no answer in"):
        calls.run(os.read, reader, 1)
    with pytest.raises(TimeoutError, match="a call before did not end"):
        calls.run(os.getpid)
    os.write(writer, b"x")
    for each in (reader, writer):
        os.close(each)


def test_what_a_call_returns_or_raises_comes_back() -> None:
    calls = BoundedCalls(60.0)
    assert calls.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        calls.run(divmod, 7, 0)
