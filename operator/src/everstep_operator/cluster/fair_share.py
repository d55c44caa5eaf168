"""Gives workers and requests out by namespace, so that one namespace whose requests hang does not hold all of them.

A request can be kept for its whole timeout by whoever owns a namespace: an admission webhook that does not answer is
enough. Nobody can tell beforehand which one will, and what is given out cannot be taken back. So a namespace gets half
of what the others leave: the first that hangs holds half, the second a quarter, and of 32 slots six that hang at once
leave nothing until a request ends. Among those that wait, the one that holds the fewest is next (max-min fairness).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass
class FairShare:
    """Who holds how many of `limit` slots."""

    limit: int
    _held: Counter[str] = field(default_factory=Counter)

    def held(self, namespace: str) -> int:
        """Return the number of slots that a namespace holds."""
        return self._held[namespace]

    def may_take(self, namespace: str) -> bool:
        """Tell whether a namespace may have one more slot now."""
        held, total = self._held[namespace], self._held.total()
        if total >= self.limit:
            return False
        return held < max(1, (self.limit - (total - held)) // 2)

    def take(self, namespace: str) -> None:
        """Note that a namespace holds one more slot."""
        self._held[namespace] += 1

    def give_back(self, namespace: str) -> None:
        """Note that a namespace holds one slot less."""
        self._held[namespace] -= 1
        if not self._held[namespace]:
            del self._held[namespace]  # namespaces come and go


class FairSemaphore:
    """A semaphore whose slots are given out by `FairShare`; within a namespace, first come, first served."""

    def __init__(self, limit: int) -> None:
        self._share = FairShare(limit)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def slot(self, namespace: str) -> AsyncIterator[None]:
        """Hold a slot for this namespace within the block; wait for one before it."""
        await self._acquire(namespace)
        try:
            yield
        finally:
            self._share.give_back(namespace)
            self._serve()

    async def _acquire(self, namespace: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the slot was given at the moment at which the caller gave up
                self._share.give_back(namespace)
            self._serve()
            raise

    def _serve(self) -> None:
        """Give slots out until nobody who waits may have one."""
        while True:
            for namespace, queue in list(self._waiting.items()):
                while queue and queue[0].done():  # cancelled
                    queue.popleft()
                if not queue:
                    del self._waiting[namespace]
            may = [namespace for namespace in self._waiting if self._share.may_take(namespace)]
            if not may:
                return
            chosen = min(may, key=self._share.held)
            self._share.take(chosen)
            self._waiting[chosen].popleft().set_result(None)
