"""For all tests: a random example may take as long as the machine needs for it; each process computes with one thread;
what is imported is not searched for garbage."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

settings.register_profile("any-machine", deadline=None, max_examples=40)
# `make test-chaos` runs the same tests with it.
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile("any-machine")

# Tests start more ranks than there are cores: threads of their own would wait for each other in every operation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every worker imports everything, and all of it stays: a fifth of that time went into looking for garbage in it.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
