"""A keyed work queue: what to look at next, never what happened.

Events only say *which* job changed; the reconcile looks at the whole of it. So a key that is waiting absorbs all
further events, and a key in work is noted and comes back once when the work is done: nothing is lost, nothing is done
twice at the same time. Workers are given out fairly: namespaces whose looks hang hold a part of them, not all.

`DelayQueue` is the queue without waiting (clock injected, tested with a fake one); `WorkQueue` adds the waiting.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from everstep_operator.cluster.fair_share import FairShare, WorkerSlot

K = TypeVar("K", bound=Hashable)


@dataclass
class DelayQueue(Generic[K]):
    """A queue that knows which key is due. All times are of `clock`, in seconds."""

    clock: Callable[[], float]
    base_backoff: float = 0.1
    max_backoff: float = 60.0
    jitter: Callable[[], float] = random.random
    share: FairShare | None = None  # of the workers; None: as many as anybody wants
    namespace: Callable[[K], str] = lambda key: ""
    # By namespace, insertion-ordered: first in, first out; value = since when.
    _ready: dict[str, dict[K, float]] = field(default_factory=dict)
    _working: dict[K, float] = field(default_factory=dict)
    _slots: dict[K, WorkerSlot] = field(default_factory=dict)  # of those in work
    _again: dict[K, float] = field(default_factory=dict)  # touched while in work
    _due: dict[K, float] = field(default_factory=dict)  # the only truth about delays; the heap may hold stale entries
    _heap: list[tuple[float, int, K]] = field(default_factory=list)
    _failures: dict[K, int] = field(default_factory=dict)
    _taken: dict[K, float] = field(default_factory=dict)  # when each key was last taken
    _counter: int = 0

    def add(self, key: K) -> None:
        """Make `key` due as soon as a worker is free, once, however often this is called before that."""
        if key in self._working:
            self._again.setdefault(key, self.clock())
        else:
            self._make_ready(key, self.clock())

    def _make_ready(self, key: K, since: float) -> None:
        self._ready.setdefault(self.namespace(key), {}).setdefault(key, since)

    def add_after(self, key: K, delay: float) -> None:
        """Make `key` due in `delay` seconds at the latest. An earlier time stays; a later one is absorbed by it."""
        if delay <= 0:
            self.add(key)
            return
        due = self.clock() + delay
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._counter += 1
            heapq.heappush(self._heap, (due, self._counter, key))
            if len(self._heap) > 2 * len(self._due) + 64:  # superseded wishes would stay until their time, days maybe
                self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
                heapq.heapify(self._heap)

    def add_spaced(self, key: K, gap: float) -> None:
        """Make `key` due at once, or `gap` seconds after it was last taken, if that is later. So a volley of events is
        one look at its first and one at all others together; none is without a look that begins after it."""
        last = self._taken.get(key)
        if last is None or last + gap < self._due.get(key, math.inf):  # else a look that is due before it sees it too
            self.add_after(key, 0.0 if last is None else last + gap - self.clock())

    def retry(self, key: K) -> float:
        """Make `key` due again after its back-off (full doubling, the upper half jittered), and return the delay in
        seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        ceiling = min(self.max_backoff, self.base_backoff * 2.0 ** min(failures, 30))
        delay = ceiling * (0.5 + self.jitter() / 2)
        self.add_after(key, delay)
        return delay

    def failures(self, key: K) -> int:
        """Return how many looks at `key` have failed in a row."""
        return self._failures.get(key, 0)

    def forget(self, key: K) -> None:
        """Reset the back-off of a key whose last reconcile succeeded."""
        self._failures.pop(key, None)

    def discard(self, key: K) -> None:
        """Drop delays and failures of an object that is gone. A key that is ready is still taken once, and finds
        nothing."""
        self._failures.pop(key, None)
        self._due.pop(key, None)
        self._taken.pop(key, None)

    def take(self) -> K | None:
        """Return the next key to work on, or None. The caller owes `done`.

        It is of the namespace that has the fewest in work, and among equals of the one that has waited longest.
        """
        self._promote()
        may = [namespace for namespace in self._ready if self.share is None or self.share.may_take(namespace)]
        if not may:
            return None
        namespace = min(may, key=self._precedence)
        keys = self._ready[namespace]
        key = next(iter(keys))
        del keys[key]
        if not keys:
            del self._ready[namespace]
        if self.share is not None:
            self._slots[key] = self.share.take(namespace)
        # The look that starts now decides when the next one is due: a wish from before would wake it for nothing.
        self._due.pop(key, None)
        self._working[key] = self._taken[key] = self.clock()
        return key

    def _precedence(self, namespace: str) -> tuple[int, float]:
        held = self.share.held(namespace) if self.share is not None else 0
        return held, next(iter(self._ready[namespace].values()))

    def done(self, key: K) -> None:
        del self._working[key]
        if self.share is not None:
            self.share.give_back(self._slots.pop(key))
        since = self._again.pop(key, None)
        if since is not None:
            self._make_ready(key, since)

    def next_chance(self) -> float | None:
        """Return when `take` may give what it does not give now, though nothing is added and nothing done."""
        share = self.share.next_change() if self.share is not None and self._ready else None
        return min((at for at in (self.next_due(), share) if at is not None), default=None)

    def next_due(self) -> float | None:
        """Return when the earliest delayed key becomes due, or None."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _promote(self) -> None:
        now = self.clock()
        while (due := self.next_due()) is not None and due <= now:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            if key in self._working:
                self._again.setdefault(key, due)
            else:
                self._make_ready(key, due)

    @property
    def depth(self) -> int:
        self._promote()
        return sum(map(len, self._ready.values())) + len(self._again)

    @property
    def in_work(self) -> int:
        return len(self._working)

    def oldest_wait(self) -> float:
        """Return the seconds for which the oldest ready key has been waiting; 0 when none is."""
        self._promote()
        return self._oldest(self._ready)

    def oldest_wait_unserved(self) -> float:
        """Return the seconds for which the oldest ready key has been waiting, of namespaces with nothing in work: the
        others wait for themselves."""
        self._promote()
        return self._oldest(
            namespace for namespace in self._ready if self.share is None or not self.share.held(namespace)
        )

    def _oldest(self, namespaces: Iterable[str]) -> float:
        since = min((min(self._ready[namespace].values()) for namespace in namespaces), default=None)
        return 0.0 if since is None else self.clock() - since

    def longest_work(self) -> float:
        """Return the seconds for which the slowest key has been in work; 0 when none is."""
        return self.clock() - min(self._working.values()) if self._working else 0.0


class WorkQueue(DelayQueue[K]):
    """A `DelayQueue` whose workers can wait. Belongs to one event loop."""

    def __init__(
        self,
        *,
        share: FairShare | None = None,
        namespace: Callable[[K], str] = lambda key: "",
    ) -> None:
        clock = asyncio.get_running_loop().time
        super().__init__(clock, share=share, namespace=namespace)
        if share is not None:
            share.clock = clock
        self._timer: asyncio.Handle | None = None  # one for all waiters
        self._timer_at: float | None = None
        self._idle = asyncio.Event()
        self._wakers: set[asyncio.Future[None]] = set()

    def add(self, key: K) -> None:
        super().add(key)
        self._wake()

    def add_after(self, key: K, delay: float) -> None:
        super().add_after(key, delay)
        self._set_timer()

    def done(self, key: K) -> None:
        super().done(key)
        self._wake()
        if not self._working:
            self._idle.set()

    def _wake(self) -> None:
        # One waiter is enough: whoever wakes takes what is ready and, if more is, wakes the next.
        for waker in self._wakers:
            if not waker.done():
                _wake_waiter(waker)
                return

    def _set_timer(self) -> None:
        """Wake a waiter when there may be something for it; without one, whoever comes next looks first."""
        at = self.next_chance() if self._wakers else None
        if self._timer is not None:
            if at == self._timer_at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._due_now) if at is not None else None

    def _due_now(self) -> None:
        self._timer = None
        self._wake()

    async def idle(self) -> None:
        """Wait until no key is in work."""
        while self._working:
            self._idle.clear()
            await self._idle.wait()

    async def get(self) -> K:
        """Wait for a key. The caller owes `done`."""
        loop = asyncio.get_running_loop()
        while True:
            key = self.take()
            if key is not None:
                if self._ready:
                    self._wake()
                self._set_timer()
                return key
            waker: asyncio.Future[None] = loop.create_future()
            self._wakers.add(waker)
            self._set_timer()
            try:
                await waker
            finally:
                self._wakers.discard(waker)


def _wake_waiter(waker: asyncio.Future[None]) -> None:
    if not waker.done():
        waker.set_result(None)
