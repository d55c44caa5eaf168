"""Work beside the event loop is done once, also where the pod may start no more threads."""

from __future__ import annotations

import threading

import pytest

from everstep.agent.system.threads import ThreadUnavailable, in_thread, in_thread_if_possible, in_thread_when_possible


def reject_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


async def test_work_that_fails_as_a_full_pod_would_is_not_done_twice() -> None:
    calls: list[str] = []

    def work() -> None:
        calls.append(threading.current_thread().name)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with pytest.raises(BlockingIOError):
        await in_thread_if_possible(work, "work")
    assert calls == ["work"]


async def test_without_threads_the_work_is_done_once_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    reject_threads(monkeypatch)
    calls: list[str] = []
    await in_thread_if_possible(lambda: calls.append("done"), "work")
    assert calls == ["done"]


async def test_a_pod_without_threads_is_told_apart_from_the_works_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    reject_threads(monkeypatch)
    with pytest.raises(ThreadUnavailable, match="start new thread"):
        await in_thread(lambda: None, "work")


async def test_work_that_must_not_hold_up_the_loop_waits_until_a_thread_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of a pod at its limit of processes is emptied once the killed ones are gone; the agent stays."""
    start = threading.Thread.start
    rejected: list[str] = []

    def start_the_third_time(self: threading.Thread) -> None:
        if len(rejected) < 2:
            rejected.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_the_third_time)
    assert await in_thread_when_possible(lambda: threading.current_thread().name, "clear-memory") == "clear-memory"
    assert rejected == ["clear-memory", "clear-memory"]
