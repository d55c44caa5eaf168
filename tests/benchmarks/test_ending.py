"""A benchmark that is told to end takes away what it has started."""

from __future__ import annotations

import signal

import pytest

from benchmarks.ending import clean_up_on_term


def test_a_benchmark_that_gets_term_leaves_its_blocks() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        clean_up_on_term()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
