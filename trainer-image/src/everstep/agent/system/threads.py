"""Blocking work beside the event loop, in threads for which nobody waits when the agent ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from typing import Callable, TypeVar

_T = TypeVar("_T")
_RETRY_SECONDS = 0.1


class ThreadUnavailable(BlockingIOError):
    """The pod may start no more threads; the work was not begun."""


async def in_thread(work: Callable[[], _T], name: str) -> _T:
    """Run `work` while the loop goes on with its heartbeats.

    The loop's own threads would keep the agent from ending until they have: a minute for a name server that is away.

    Args:
        work: A function that blocks. Cancelling the caller leaves it to itself.
        name: The thread's.

    Returns:
        Its result.

    Raises:
        ThreadUnavailable: The pod may start no more threads.
        Exception: Whatever `work` raises.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_T] = loop.create_future()

    def tell(result: Callable[[], None]) -> None:
        if not answer.done():
            result()

    def run() -> None:
        try:
            value = work()
        except Exception as error:
            failed = error  # `error` itself is unbound after this clause
            result = lambda: answer.set_exception(failed)  # noqa: E731
        else:
            result = lambda: answer.set_result(value)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the agent has ended
            loop.call_soon_threadsafe(tell, result)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise ThreadUnavailable(errno.EAGAIN, str(error)) from error
    return await answer


async def in_thread_if_possible(work: Callable[[], _T], name: str) -> _T:
    """Run `work` in a thread; where the pod may start no more threads, the loop has to wait.

    Args:
        work: A function that blocks, but not for long.
        name: The thread's.

    Returns:
        Its result.

    Raises:
        Exception: Whatever `work` raises.
    """
    try:
        return await in_thread(work, name)
    except ThreadUnavailable:
        return work()


async def in_thread_when_possible(work: Callable[[], _T], name: str) -> _T:
    """Run `work` in a thread, as soon as the pod may start one; the loop goes on meanwhile.

    Args:
        work: A function that may block for long.
        name: The thread's.

    Returns:
        Its result.

    Raises:
        Exception: Whatever `work` raises.
    """
    while True:
        try:
            return await in_thread(work, name)
        except ThreadUnavailable:
            await asyncio.sleep(_RETRY_SECONDS)
