"""A namespace whose requests hang holds a part of the workers and requests; the others go on."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everstep_operator.app import Operator
from everstep_operator.cluster.action_executor import ActionExecutor, JobRef
from everstep_operator.cluster.agent_code import AgentCode
from everstep_operator.cluster.fair_share import SLOW_SECONDS, FairSemaphore, FairShare
from everstep_operator.cluster.server_clock import ServerClock
from everstep_operator.cluster.work_queue import DelayQueue, WorkQueue
from everstep_operator.plan.actions import DeletePods, PodRef
from everstep_operator.settings import OperatorSettings
from tests.integration.world import until

NAMESPACES = st.sampled_from("abcdef")


class ApiServer:
    """Hangs in one namespace, and notes what it was asked in the others."""

    clock = ServerClock()

    def __init__(self) -> None:
        self.deleted: list[str] = []

    async def delete(self, resource: Any, namespace: str, name: str, **_: Any) -> bool:
        if namespace == "hanging":
            await asyncio.Event().wait()
        self.deleted.append(name)
        return True


async def test_a_namespace_whose_looks_hang_leaves_workers_to_others() -> None:
    server: Any = ApiServer()
    operator = Operator(OperatorSettings.load({}, {}), server, (b"key",), AgentCode(b"code"))
    for number in range(100):
        operator.queue.add(("hanging", f"job-{number}"))
    for _ in range(operator.settings.workers):
        operator.queue.take()  # none of these looks ever ends
    operator.queue.add(("other", "digits"))
    assert operator.queue.in_work < operator.settings.workers
    assert operator.queue.take() == ("other", "digits")


async def test_a_server_that_rejects_requests_for_their_number_gets_fewer_and_then_more_again() -> None:
    requests = FairSemaphore(64)
    clock = FakeClock()
    requests._share.clock = clock

    async def send(count: int) -> None:
        for _ in range(count):
            async with requests.slot("ns"):
                pass

    requests.slow_down()
    requests.slow_down()
    assert requests.limit == 32, "a volley of rejections is one"
    for _ in range(10):
        clock.now += 2
        requests.slow_down()
    assert requests.limit == 4, "it never stops"
    await send(10)
    assert 4 < requests.limit < 10, "more again, step by step"
    await send(5000)
    assert requests.limit == 64, "and no more than before"


class FakeClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_a_namespace_whose_requests_hang_leaves_requests_to_others() -> None:
    server: Any = ApiServer()
    operator = Operator(OperatorSettings.load({}, {}), server, (b"key",), AgentCode(b"code"))
    actor: ActionExecutor = operator.reconciler.actor

    def delete(namespace: str, number: int) -> Any:
        job = JobRef(namespace, f"job-{number}", uid="u", version="1", confirmed=True)
        pods = tuple(PodRef(f"pod-{index}", f"uid-{index}") for index in range(60))
        return actor.execute(job, [DeletePods(pods, "")])

    hanging = [asyncio.create_task(delete("hanging", number)) for number in range(16)]
    for _ in range(10):
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await delete("other", 0)
    assert len(server.deleted) == 60
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def trusting(limit: int, *namespaces: str, clock: Clock | None = None) -> FairShare:
    """A share that has seen each of these give a slot back at once."""
    share = FairShare(limit, clock or Clock())
    for namespace in namespaces:
        share.give_back(share.take(namespace))
    return share


def test_the_namespace_with_the_fewest_in_work_is_next() -> None:
    queue: DelayQueue[str] = DelayQueue(Clock(), share=trusting(16, "a"), namespace=lambda key: key[0])
    for number in range(5):
        queue.add(f"a{number}")
    queue.add("b0")
    assert [queue.take() for _ in range(4)] == ["a0", "b0", "a1", "a2"]


def test_a_namespace_that_waits_for_itself_is_no_sign_of_workers_that_hang() -> None:
    now = [0.0]
    queue: DelayQueue[str] = DelayQueue(lambda: now[0], share=FairShare(2), namespace=lambda key: key[0])
    queue.add("a0")
    queue.add("a1")
    assert queue.take() == "a0"
    now[0] = 1000
    assert (queue.take(), queue.oldest_wait(), queue.oldest_wait_unserved()) == (None, 1000, 0)
    queue.add("b0")
    now[0] = 1001
    assert queue.oldest_wait_unserved() == 1


@given(st.integers(1, 64), st.lists(NAMESPACES, max_size=200), st.booleans())
def test_no_more_slots_are_given_out_than_there_are(limit: int, wishes: list[str], trusted: bool) -> None:
    clock = Clock()
    share = trusting(limit, *("abcdef" if trusted else ""), clock=clock)
    for number, namespace in enumerate(wishes):
        if share.may_take(namespace):
            share.take(namespace)
        if number % 20 == 19:
            clock.now += SLOW_SECONDS
    assert sum(map(share.held, "abcdef")) <= share.most


def test_a_lone_namespace_gets_half() -> None:
    share = trusting(32, "a")
    while share.may_take("a"):
        share.take("a")
    assert share.held("a") == 16


def test_a_namespace_that_nobody_knows_shows_first_that_it_does_not_hang() -> None:
    share = FairShare(32, Clock())
    slots = [share.take("a") for _ in range(4)]
    assert not share.may_take("a")
    share.give_back(slots[0])
    share.take("a")
    assert share.may_take("a")


def test_namespaces_that_nobody_knows_leave_half_to_those_that_are_known() -> None:
    share = trusting(32, "known")
    for number in range(100):
        if share.may_take(f"new-{number}"):
            share.take(f"new-{number}")
    assert sum(share.held(f"new-{number}") for number in range(100)) == 16
    assert share.may_take("known")


def test_whether_one_more_is_given_does_not_cost_more_where_many_hold_some() -> None:
    """It is asked of each namespace that waits, and there may be thousands of them."""

    def calls(holders: int) -> int:
        share, count = FairShare(100, Clock()), 0
        for number in range(holders):
            share.take(f"new-{number}")

        def called(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += 1

        sys.setprofile(called)
        try:
            share.may_take("asks")
        finally:
            sys.setprofile(None)
        return count

    assert calls(40) == calls(4)


class Workload:
    """Namespaces that always have more to do. Some hang from some time on: each of their slots is held for 30 s."""

    HANGS, STEP = 30.0, 0.5

    def __init__(self, limit: int, healthy: int, hang_from: dict[str, float]) -> None:
        self.clock = Clock()
        self.queue: DelayQueue[tuple[str, int]] = DelayQueue(
            self.clock, share=FairShare(limit, self.clock), namespace=lambda key: key[0]
        )
        self.healthy = [f"healthy-{number}" for number in range(healthy)]
        self.hang_from = hang_from
        self.ends: dict[tuple[str, int], float] = {}
        self.served = dict.fromkeys(self.healthy, 0.0)
        self.waited = 0.0  # the longest of any healthy one
        for namespace in [*self.healthy, *hang_from]:
            for number in range(40):
                self.queue.add((namespace, number))

    def step(self) -> None:
        for key in [key for key, end in self.ends.items() if end <= self.clock.now]:
            del self.ends[key]
            self.queue.add(key)
            self.queue.done(key)
        while (taken := self.queue.take()) is not None:
            hangs = self.clock.now >= self.hang_from.get(taken[0], float("inf"))
            self.ends[taken] = self.clock.now + (self.HANGS if hangs else self.STEP)
            if taken[0] in self.served:
                self.served[taken[0]] = self.clock.now
        self.clock.now += self.STEP
        self.waited = max([self.waited, *(self.clock.now - at for at in self.served.values())])


@given(
    st.integers(8, 40),
    st.integers(1, 4),
    st.lists(st.floats(0, 60).map(lambda at: 0.0 if at < 20 else at), max_size=8),
    st.integers(0, 60),
)
@settings(max_examples=30, deadline=None)
def test_however_many_namespaces_hang_those_that_do_not_go_on(
    limit: int, healthy: int, break_at: list[float], always: int
) -> None:
    hang_from = {f"breaks-{number}": at for number, at in enumerate(break_at)}
    hang_from |= {f"new-{number}": 5.0 for number in range(always)}
    workload = Workload(limit, healthy, hang_from)
    while workload.clock.now < 120:
        workload.step()
    assert workload.waited <= SLOW_SECONDS + 4 * workload.STEP


async def test_six_namespaces_that_hang_leave_workers_to_a_seventh() -> None:
    server: Any = ApiServer()
    operator = Operator(OperatorSettings.load({}, {}), server, (b"key",), AgentCode(b"code"))
    now = Clock()
    operator.workers.clock = operator.queue.clock = now
    for namespace in ("healthy", *"abcdef"):
        operator.queue.add((namespace, "first"))
        while (key := operator.queue.take()) is not None:
            operator.queue.done(key)  # nothing hangs yet
        for number in range(100):
            operator.queue.add((namespace, f"job-{number}"))
    while (taken := operator.queue.take()) is not None:
        if taken[0] == "healthy":
            operator.queue.done(taken)
    operator.queue.add(("healthy", "digits"))
    now.now += SLOW_SECONDS
    assert operator.queue.take() == ("healthy", "digits")


async def test_a_slot_that_is_held_for_long_wakes_who_waits_for_one() -> None:
    """Nobody gives anything back, and nothing is added: time alone makes room."""
    queue: WorkQueue[str] = WorkQueue(share=FairShare(1), namespace=lambda key: key[0])
    queue.add("a0")
    assert await queue.get() == "a0"
    queue.add("b0")
    waiting = [asyncio.create_task(queue.get()) for _ in range(3)]
    semaphore = FairSemaphore(1)
    inside: list[str] = []

    async def hold(namespace: str) -> None:
        async with semaphore.slot(namespace):
            inside.append(namespace)
            await asyncio.Event().wait()

    holding = [asyncio.create_task(hold(namespace)) for namespace in "ab"]
    async with asyncio.timeout(120):
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == ["b0"]

    async def both() -> bool:
        return inside == ["a", "b"]

    await until(both, "both are inside")
    for task in (*waiting, *holding):
        task.cancel()
    await asyncio.gather(*waiting, *holding, return_exceptions=True)


class SemaphoreMachine(RuleBasedStateMachine):
    """Tasks come, hold, leave and give up in any order: no slot is lost, and nobody waits who may have one."""

    LIMIT = 6

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.semaphore = FairSemaphore(self.LIMIT)
        self.tasks: list[tuple[str, asyncio.Task[None], asyncio.Event]] = []
        self.inside: list[str] = []

    def teardown(self) -> None:
        for _, task, _ in self.tasks:
            task.cancel()
        self.settle()
        self.loop.close()

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    @rule(namespace=NAMESPACES)
    def come(self, namespace: str) -> None:
        leave = asyncio.Event()

        async def hold() -> None:
            async with self.semaphore.slot(namespace):
                self.inside.append(namespace)
                try:
                    await leave.wait()
                finally:
                    self.inside.remove(namespace)

        self.tasks.append((namespace, self.loop.create_task(hold()), leave))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), gives_up=st.booleans())
    def go(self, data: st.DataObject, gives_up: bool) -> None:
        _, task, leave = self.tasks.pop(data.draw(st.integers(0, len(self.tasks) - 1)))
        if gives_up:
            task.cancel()
        leave.set()

    @rule()
    def time_passes(self) -> None:
        self.settle()

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        self.settle()
        assert len(self.inside) <= self.LIMIT
        share = self.semaphore._share
        assert sum(share.held(namespace) for namespace in "abcdef") == len(self.inside)
        for namespace, task, _ in self.tasks:
            waiting = not task.done() and self.inside.count(namespace) < sum(n == namespace for n, _, _ in self.tasks)
            assert not (waiting and share.may_take(namespace))


TestSemaphore = SemaphoreMachine.TestCase
TestSemaphore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


async def test_one_who_gives_up_at_the_moment_of_its_turn_passes_it_on() -> None:
    semaphore = FairSemaphore(1)
    inside: list[str] = []

    async def hold(name: str) -> None:
        async with semaphore.slot(name):
            inside.append(name)

    async with semaphore.slot("first"):
        waiting = [asyncio.create_task(hold(name)) for name in ("second", "third")]
        await asyncio.sleep(0)
    waiting[0].cancel()  # it has the slot, and has not run since
    await asyncio.gather(*waiting, return_exceptions=True)

    async def served() -> bool:
        return inside == ["third"]

    await until(served, "the third has its turn")
