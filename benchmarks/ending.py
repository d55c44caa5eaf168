"""End a benchmark that is told to."""

from __future__ import annotations

import signal
import sys


def clean_up_on_term() -> None:
    """Let TERM, as `timeout` sends it, end a benchmark as Ctrl-C does.

    What it has started on a cluster is taken away then. A thousand pods that stay are a part of what others measure.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
