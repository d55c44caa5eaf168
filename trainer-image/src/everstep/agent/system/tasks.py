"""The one way in which the agent starts tasks: none of them ends by a mistake that nobody sees."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Callable, TypeVar

_T = TypeVar("_T")


class Tasks:
    """The tasks of one owner, which are kept from the garbage collector until they end."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        """Start with none.

        Args:
            failed: Called with what a task raised, unless it was cancelled.
        """
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run `work` until it ends, raises or is cancelled.

        Args:
            work: A coroutine that nobody awaits.

        Returns:
            Its task; whoever awaits it sees the exception as well.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def cancel(self) -> None:
        """Cancel all that have not ended."""
        for task in list(self._tasks):
            task.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)
