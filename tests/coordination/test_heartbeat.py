"""Heartbeats among themselves: who is lost, who has left, who is late."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from everstep.coordination.heartbeat import Heartbeat

TIMEOUT = 0.6
SOON = 30.0  # a deadline, not a time that anything takes


@contextlib.contextmanager
def ring(size: int, alive: Sequence[int]) -> Iterator[list[Heartbeat]]:
    """Start a ring of `size` ranks of which some run; the others are bound to an address, as a frozen process is."""
    hearts = [Heartbeat(rank, TIMEOUT, lambda rank=rank: 10 * rank) for rank in range(size)]  # type: ignore[misc]
    addresses = [heart.address for heart in hearts]
    for rank in alive:
        hearts[rank].start(addresses, b"of this job")
    try:
        yield hearts
    finally:
        for rank in alive:
            hearts[rank].stop()


@pytest.mark.parametrize("silent", [0, 1, 3])
def test_a_silent_rank_is_named_on_all_others(silent: int) -> None:
    alive = [rank for rank in range(4) if rank != silent]
    with ring(4, alive) as hearts:
        found = [hearts[rank].lost(SOON) for rank in alive]
    assert [lost.ranks if lost else None for lost in found] == [(silent,)] * 3
    assert "gave no sign of life for 0." in str(found[0])


def test_ranks_that_have_left_are_not_lost() -> None:
    with ring(3, range(3)) as hearts:
        hearts[1].stop()
        hearts[2].stop()
        assert hearts[0].lost(3 * TIMEOUT) is None


def test_who_is_told_of_a_loss_calls_back_once() -> None:
    told: list[int] = []
    with ring(3, [0, 2]) as hearts:
        for rank in (0, 2):
            hearts[rank]._on_lost = lambda lost: told.append(lost.ranks[0])
        assert hearts[0].lost(SOON)
        assert hearts[2].lost(SOON)
    assert told == [1, 1]


def test_a_rank_that_fails_tells_all_others_its_reason() -> None:
    with ring(4, range(4)) as hearts:
        hearts[2].fail(ValueError("no such file\nwith a trace"))
        found = [str(hearts[rank].lost(SOON)) for rank in (0, 1, 3)]
    assert found == ["rank 2 failed: ValueError: no such file; all ranks have to be started again"] * 3


def test_who_leaves_is_named_if_others_begin_another_step() -> None:
    with ring(3, range(3)) as hearts:
        for heart in hearts:
            heart.follow(lambda: 0, lambda: 5)
        hearts[1].stop()
        assert hearts[0].lost(TIMEOUT) is None
        hearts[2].follow(lambda: 0, lambda: 6)
        assert "rank 1 has left after 5 calls" in str(hearts[0].lost(SOON))


def test_a_rank_that_has_left_still_watches_the_one_before_it() -> None:
    with ring(3, [0, 2]) as hearts:  # the one between them stands still
        hearts[2].stop()
        assert getattr(hearts[0].lost(SOON), "ranks", None) == (1,)


WORDS = [
    b"7",
    b'{"alive": 0, "progress": 0}',
    b'{"lost": 0, "why": "says a stranger"}',
    b'{"leaves": 0, "passes": 0}',
    b"[" * 50_000,
    b"GET / HTTP/1.1",
    b"\xff" * 100_000,
]


@pytest.mark.parametrize("word", WORDS, ids=range(len(WORDS)))
def test_strangers_that_come_to_the_port_change_nothing(word: bytes) -> None:
    with ring(2, range(2)) as hearts:
        for code in (b"", b"0" * 64):
            with socket.create_connection(hearts[1].address) as stranger, contextlib.suppress(OSError):
                stranger.sendall(code + word + b"\n")
                assert stranger.recv(1) == b""
        assert hearts[0].lost(2 * TIMEOUT) is None
        assert hearts[1].lost() is None


def test_what_was_said_to_another_rank_is_not_believed() -> None:
    with ring(3, range(3)) as hearts:
        said = hearts[0]._line(1, {"lost": 2, "why": "as another was told"})
        with socket.create_connection(hearts[2].address) as stranger, contextlib.suppress(OSError):
            stranger.sendall(said)
            assert stranger.recv(1) == b""
        assert hearts[2].lost(2 * TIMEOUT) is None


def test_strangers_that_stay_keep_no_rank_away() -> None:
    """More connections than a rank holds, before the ring has begun: ranks join, and a lost one is named."""
    hearts = [Heartbeat(rank, TIMEOUT) for rank in range(3)]
    with contextlib.ExitStack() as stack:
        for heart in hearts:
            for _ in range(80):
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(heart.address)
        for heart in hearts[:2]:
            stack.callback(heart.stop)
            heart.start([each.address for each in hearts], b"of this job")
        lost = hearts[0].lost(SOON)
        assert lost
        assert lost.ranks == (2,)


def test_ranks_of_a_node_that_is_gone_do_not_delay_the_word_to_others() -> None:
    """Five addresses take connections and answer nothing, as those of frozen processes do."""
    with ring(8, [0, 7]) as hearts:
        began = time.monotonic()
        lost = hearts[7].lost(SOON)
        assert lost
        assert lost.ranks == (6,)
        assert hearts[0].lost(SOON)
    assert time.monotonic() - began < SOON


def test_a_heartbeat_is_no_answer_to_another_one() -> None:
    """Ranks send by the clock: if each sent when it hears one, heartbeats would go round as fast as the machine can."""
    began, interval = time.monotonic(), TIMEOUT / 10
    sent, enough = [0, 0], threading.Event()

    def count(rank: int) -> int:
        sent[rank] += 1
        if min(sent) >= 6:
            enough.set()
        return 0

    with ring(2, []) as hearts:
        for rank, heart in enumerate(hearts):
            heart.follow(partial(count, rank), lambda: 0)
            heart.start([each.address for each in hearts], b"of this job")
        assert enough.wait(SOON)
        most = max(sent)
        seconds = time.monotonic() - began
        for heart in hearts:
            heart.stop()
    assert most <= seconds / interval + 2
