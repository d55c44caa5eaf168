"""Prints how long each part of a start took, as it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def phase(name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"  {name:<34} {time.monotonic() - started:5.1f} s", flush=True)
