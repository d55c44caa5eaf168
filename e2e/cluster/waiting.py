"""Waiting on a condition with a deadline; nothing here ever sleeps for luck."""

from __future__ import annotations

import time
from collections.abc import Callable

from e2e.cluster.errors import ClusterError


def until(condition: Callable[[], bool], what: str, timeout: float, interval: float = 0.05) -> None:
    """Return once ``condition()`` holds; after ``timeout`` seconds raise an error that names ``what``."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout:g} s in vain: {what}")
        time.sleep(interval)
