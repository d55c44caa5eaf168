"""Gives workers and requests out by namespace, so that namespaces whose requests hang do not hold all of them.

A request can be kept for its whole timeout by whoever owns a namespace: an admission webhook that does not answer is
enough, and one webhook may do it to many namespaces at once. Nobody can tell beforehand which ones, and what is given
out cannot be taken back. So a slot that has been held for `SLOW_SECONDS` no longer counts against the limit: others get
one in its place. What that may add up to is bounded:

- a namespace gets half of what the others leave, if the last that is known of it is a slot that it gave back soon;
- any other one, new or slow, gets an eighth of the limit at most, and all of them half of it;
- they leave `limit` of the `most` slots that exist to those that are trusted.

So however many namespaces hang, one that is trusted gets a slot within `SLOW_SECONDS`; only the moment in which very
many begin to hang, each in the middle of a burst, can use all slots up, for as long as one request lasts. Among those
that wait, the one that holds the fewest is next (max-min fairness).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

SLOW_SECONDS = 10.0  # looks and requests take some milliseconds, where the API server is overloaded some seconds
EXTRA = 4  # so many times the limit exist, while slots are held for long
FORGET_ABOVE = 10_000  # namespaces
SLOW_DOWN_SECONDS = 1.0
LEAST_LIMIT = 4.0  # of requests, however many the server rejects


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """A slot that a namespace holds, or held."""

    namespace: str
    since: float
    counts: bool = True  # against the limit: neither given back nor slow


@dataclass
class FairShare:
    """A count of the worker slots that each namespace holds, which tells whether a namespace may have one more.

    At most `limit` slots may be held at once, not counting slow ones; `clock` returns seconds.
    """

    limit: int
    clock: Callable[[], float] = time.monotonic
    _held: Counter[str] = field(default_factory=Counter)
    _quick: Counter[str] = field(default_factory=Counter)  # of those that are held, the ones that count
    # Sums of these, kept: each look asks for every namespace that waits, and there may be thousands.
    _all_held: int = 0
    _all_quick: int = 0
    _quick_not_trusted: int = 0
    _in_order: deque[WorkerSlot] = field(
        default_factory=deque
    )  # those that count, the oldest first; given back ones between
    _trusted: dict[str, None] = field(default_factory=dict)  # in the order in which trust was last earned

    @property
    def most(self) -> int:
        """Return how many slots may be held in all."""
        return EXTRA * self.limit

    def held(self, namespace: str) -> int:
        """Return the number of slots that a namespace holds."""
        return self._held[namespace]

    def may_take(self, namespace: str) -> bool:
        """Tell whether a namespace may have one more slot now."""
        self._find_slow()
        held, quick = self._all_held, self._all_quick
        own_held, own_quick = self._held.get(namespace, 0), self._quick.get(namespace, 0)
        if quick >= self.limit or held >= self.most:
            return False
        if namespace in self._trusted:
            return own_quick < max(1, (self.limit - (quick - own_quick)) // 2)
        few = own_held < max(1, self.limit // 8) and self._quick_not_trusted < max(1, self.limit // 2)
        return few and held < self.most - self.limit

    def take(self, namespace: str) -> WorkerSlot:
        """Give a namespace one more slot."""
        slot = WorkerSlot(namespace, self.clock())
        self._in_order.append(slot)
        self._held[namespace] += 1
        self._all_held += 1
        self._count_quick(namespace, 1)
        return slot

    def give_back(self, slot: WorkerSlot) -> None:
        """Note that a slot is no longer held."""
        self._find_slow()
        namespace = slot.namespace
        _add(self._held, namespace, -1)
        self._all_held -= 1
        if slot.counts:
            slot.counts = False
            self._count_quick(namespace, -1)
            self._distrust(namespace)
            self._trusted[namespace] = None
            self._quick_not_trusted -= self._quick[namespace]
            if len(self._trusted) > FORGET_ABOVE:
                self._distrust(next(iter(self._trusted)))

    def next_change(self) -> float | None:
        """Return when a slot becomes slow if it is held until then; None: never."""
        self._find_slow()
        return self._in_order[0].since + SLOW_SECONDS if self._in_order else None

    def _find_slow(self) -> None:
        before = self.clock() - SLOW_SECONDS
        while self._in_order and (not self._in_order[0].counts or self._in_order[0].since <= before):
            slot = self._in_order.popleft()
            if slot.counts:
                slot.counts = False
                self._count_quick(slot.namespace, -1)
                self._distrust(slot.namespace)

    def _count_quick(self, namespace: str, more: int) -> None:
        _add(self._quick, namespace, more)
        self._all_quick += more
        self._quick_not_trusted += more if namespace not in self._trusted else 0

    def _distrust(self, namespace: str) -> None:
        if namespace in self._trusted:
            del self._trusted[namespace]
            self._quick_not_trusted += self._quick[namespace]


def _add(counter: Counter[str], namespace: str, more: int) -> None:
    counter[namespace] += more
    if not counter[namespace]:
        del counter[namespace]  # namespaces come and go


class FairSemaphore:
    """A semaphore whose slots are given out by `FairShare`; within a namespace, first come, first served.

    The limit adapts to a server that rejects requests for their number: `slow_down` halves it, and each slot that is
    given back raises it by a little, up to what it was (additive increase, multiplicative decrease, as in TCP).
    """

    def __init__(self, limit: int) -> None:
        self._share = FairShare(limit, time.monotonic)
        self._most = limit
        self._allowed = float(limit)  # the present limit, with its fraction
        self._slowed_at = float("-inf")
        self._waiting: dict[str, deque[asyncio.Future[WorkerSlot]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def slot(self, namespace: str) -> AsyncIterator[None]:
        """Hold a slot for this namespace within the block; wait for one before it."""
        is_free = not self._waiting and self._share.may_take(namespace)
        slot = self._share.take(namespace) if is_free else await self._acquire(namespace)
        try:
            yield
        finally:
            self._share.give_back(slot)
            self._set_limit(self._allowed + 1 / self._allowed)
            if self._waiting:
                self._serve()

    @property
    def limit(self) -> int:
        """Return how many slots may be held now, not counting slow ones."""
        return self._share.limit

    def slow_down(self) -> None:
        """Halve the limit. A volley of rejections within a second is one."""
        now = self._share.clock()
        if now - self._slowed_at >= SLOW_DOWN_SECONDS:
            self._slowed_at = now
            self._set_limit(self._allowed / 2)

    def _set_limit(self, allowed: float) -> None:
        self._allowed = min(float(self._most), max(LEAST_LIMIT, allowed))
        self._share.limit = min(self._most, int(self._allowed))

    async def _acquire(self, namespace: str) -> WorkerSlot:
        turn: asyncio.Future[WorkerSlot] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(turn)
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the slot was given at the moment at which the caller gave up
                self._share.give_back(turn.result())
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
                break
            chosen = min(may, key=self._share.held)
            self._waiting[chosen].popleft().set_result(self._share.take(chosen))
        self._serve_later()

    def _serve_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        change = self._share.next_change()
        if self._waiting and change is not None:
            delay = max(0.0, change - self._share.clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._serve)
