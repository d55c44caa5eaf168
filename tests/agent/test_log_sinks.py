"""Sinks of logs: what two of them write to one file are whole lines."""

from __future__ import annotations

import os
import time
from pathlib import Path

from everstep.agent.ranks.logs import MAX_LINE_BYTES, LogSink

PATIENCE = 60.0


def test_lines_of_two_sinks_of_one_file_stay_whole(tmp_path: Path) -> None:
    """stdout and stderr are one file under `everstep run … 2>&1`, and on a terminal."""
    longest, short = b"a" * MAX_LINE_BYTES, b"e" * 50
    for number in range(20):
        path = tmp_path / str(number)
        with path.open("wb") as file, os.fdopen(os.dup(file.fileno()), "wb") as other:
            sinks = LogSink(file.fileno()), LogSink(other.fileno())
            for _ in range(6):
                assert sinks[0].write(longest + b"\n")
            for _ in range(200):
                assert sinks[1].write(short + b"\n")
            for sink in sinks:
                sink.close(PATIENCE, time.monotonic() + PATIENCE)
        assert sorted(path.read_bytes().splitlines()) == [longest] * 6 + [short] * 200
