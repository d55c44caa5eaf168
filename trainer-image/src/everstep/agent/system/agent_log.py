"""The agent's own few lines in the pod's log."""

from __future__ import annotations

import sys
from typing import Callable

_write: Callable[[str], None] | None = None


def route_log_lines(write: Callable[[str], None] | None) -> None:
    """Send log lines this way from now on: a log that nobody reads must not stop the agent. None: straight to
    stderr."""
    global _write
    _write = write


def log_line(text: str) -> None:
    """Write one line for the people who read the pod's log."""
    if _write is not None:
        _write(f"everstep: {text}")
    else:
        print(f"everstep: {text}", file=sys.stderr, flush=True)
