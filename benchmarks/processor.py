"""Reads the processor time of a process."""

from __future__ import annotations

import psutil


def read_processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
