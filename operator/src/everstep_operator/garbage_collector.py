"""Sets the garbage collector of the process."""

from __future__ import annotations

import gc


def tune_garbage_collector() -> None:
    """Leave what has been made until now alone, and collect more seldom.

    Modules and models are hundreds of thousands of objects that stay for ever, and every collection looks at them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
