"""The work queue: nothing lost, nothing twice at a time, back-off that grows and is forgotten."""

from __future__ import annotations

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from everstep_operator.cluster.work_queue import DelayQueue, WorkQueue

KEYS = st.sampled_from("abc")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class QueueMachine(RuleBasedStateMachine):
    """Any order of events, looks and time: a key that was touched after its last look began is looked at again."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queue: DelayQueue[str] = DelayQueue(self.clock, jitter=lambda: 1.0)
        self.working: set[str] = set()
        self.touched: set[str] = set()  # since their last look began
        self.due: dict[str, float] = {}
        self.taken: dict[str, float] = {}  # when each was last taken

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.queue.add(key)
        self.touched.add(key)

    @rule(key=KEYS, delay=st.floats(0.1, 10))
    def add_after(self, key: str, delay: float) -> None:
        self.queue.add_after(key, delay)
        self.due[key] = min(self.due.get(key, float("inf")), self.clock.now + delay)

    @rule(key=KEYS, gap=st.floats(0.1, 3))
    def add_spaced(self, key: str, gap: float) -> None:
        self.queue.add_spaced(key, gap)
        due = self.taken.get(key, float("-inf")) + gap
        if due <= self.clock.now:
            self.touched.add(key)
        else:
            self.due[key] = min(self.due.get(key, float("inf")), due)

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def take(self) -> None:
        self._ripen()
        key = self.queue.take()
        if key is None:
            assert not self.touched - self.working, "a touched key is nowhere"
            return
        assert key not in self.working, "two looks at one job at a time"
        assert key in self.touched, "a look that nobody asked for"
        self.working.add(key)
        self.taken[key] = self.clock.now
        self.touched.discard(key)
        self.due.pop(key, None)

    @rule(key=KEYS)
    def done(self, key: str) -> None:
        if key in self.working:
            self.queue.done(key)
            self.working.discard(key)

    @rule(key=KEYS)
    def fail(self, key: str) -> None:
        if key in self.working:
            delay = self.queue.retry(key)
            self.due[key] = min(self.due.get(key, float("inf")), self.clock.now + delay)
            self.done(key)

    def _ripen(self) -> None:
        for key, due in list(self.due.items()):
            if due <= self.clock.now:
                self.touched.add(key)
                del self.due[key]

    @invariant()
    def depth_counts_each_waiting_key_once(self) -> None:
        self._ripen()
        assert self.queue.depth == len(self.touched)
        assert self.queue.in_work == len(self.working)

    @invariant()
    def the_next_wake_up_is_the_earliest_delay(self) -> None:
        self._ripen()
        assert self.queue.depth >= 0  # promotes
        expected = min(self.due.values(), default=None)
        assert self.queue.next_due() == expected


TestQueueMachine = QueueMachine.TestCase


def test_a_volley_of_events_is_two_looks_and_the_last_event_is_seen() -> None:
    clock = Clock()
    queue: DelayQueue[str] = DelayQueue(clock)
    seen, events = [], 0
    for _ in range(64):  # for a second, with a gap of a quarter
        events += 1
        queue.add_spaced("a", 0.25)
        if queue.take() is not None:
            seen.append((clock.now, events))
            events += 1
            queue.add_spaced("a", 0.25)  # while it is in work
            queue.done("a")
        clock.now += 1 / 64
    clock.now += 0.25
    assert queue.take() == "a", "the last event leads to a look"
    assert [round(at - 1000.0, 2) for at, _ in seen] == [0.0, 0.25, 0.5, 0.75]
    queue.done("a")
    queue.discard("a")
    queue.add_spaced("a", 0.25)
    assert queue.take() == "a", "nothing is kept of what is gone"


def test_an_event_after_a_pause_is_looked_at_at_once() -> None:
    clock = Clock()
    queue: DelayQueue[str] = DelayQueue(clock)
    queue.add_spaced("a", 0.25)
    assert queue.take() == "a"
    queue.done("a")
    clock.now += 10
    queue.add_spaced("a", 0.25)
    assert queue.take() == "a"


def test_first_in_first_out() -> None:
    queue: DelayQueue[str] = DelayQueue(Clock())
    for key in "cab":
        queue.add(key)
    queue.add("c")
    assert [queue.take() for _ in range(4)] == ["c", "a", "b", None]


def test_the_back_off_doubles_to_its_limit_and_starts_over_after_a_success() -> None:
    clock = Clock()
    queue: DelayQueue[str] = DelayQueue(clock, base_backoff=1, max_backoff=10, jitter=lambda: 1.0)
    assert [queue.retry("a") for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    queue.forget("a")
    assert queue.retry("a") == 1


def test_the_jitter_takes_at_most_half() -> None:
    queue: DelayQueue[str] = DelayQueue(Clock(), base_backoff=1, jitter=lambda: 0.0)
    assert queue.retry("a") == 0.5


def test_wishes_that_were_superseded_do_not_pile_up() -> None:
    clock = Clock()
    queue: DelayQueue[str] = DelayQueue(clock)
    for _ in range(10_000):  # a finished job with a TTL of days, touched again and again
        queue.add("a")
        assert queue.take() == "a"
        queue.add_after("a", 1_000_000)
        queue.done("a")
        clock.now += 1
    assert len(queue._heap) < 100


def test_ages() -> None:
    clock = Clock()
    queue: DelayQueue[str] = DelayQueue(clock)
    queue.add("a")
    queue.add("b")
    clock.now += 3
    assert queue.oldest_wait() == 3
    assert queue.take() == "a"
    clock.now += 4
    assert (queue.oldest_wait(), queue.longest_work()) == (7, 4)


async def test_workers_wait_and_every_key_is_seen() -> None:
    queue: WorkQueue[int] = WorkQueue()
    seen: list[int] = []
    all_seen = asyncio.Event()

    async def work() -> None:
        while True:
            key = await queue.get()
            await asyncio.sleep(0)
            seen.append(key)
            queue.done(key)
            if len(seen) == 100:
                all_seen.set()

    workers = [asyncio.create_task(work()) for _ in range(4)]
    await asyncio.sleep(0)
    for key in range(100):
        queue.add(key) if key % 2 else queue.add_after(key, 0.01)
    async with asyncio.timeout(5):
        await all_seen.wait()
        await queue.idle()
    assert sorted(seen) == list(range(100))
    for worker in workers:
        worker.cancel()


async def test_an_earlier_wish_wakes_a_waiter_that_waits_for_a_later_one() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("late", 60)
    waiter = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add_after("soon", 0.01)
    assert await asyncio.wait_for(waiter, 5) == "soon"
