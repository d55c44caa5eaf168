"""Threads for a while, also in a process whose interpreter ends meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_ENDS = "after interpreter shutdown"  # as Python says it


class ThreadPool(ThreadPoolExecutor):
    """A pool whose work is done by whoever gives it, where Python takes no more for other threads.

    That is so once the main thread has ended: in functions that `atexit` calls, which may save a last checkpoint, and
    in a thread that trains on.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See ThreadPoolExecutor.submit()."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if not str(error).endswith(_ENDS):
                raise
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done
