"""Heartbeats among themselves: who is lost, who has left, who is late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from everstep.pipeline.engine.heartbeat import Heartbeat

TIMEOUT = 0.6
SOON = 30.0  # a deadline, not a time that anything takes


@contextlib.contextmanager
def ring(size: int, alive: Sequence[int]) -> Iterator[list[Heartbeat]]:
    """Of `size` ranks, of which only some live; the others are bound to an address, as a frozen process is."""
    hearts = [Heartbeat(rank, TIMEOUT, lambda rank=rank: 10 * rank) for rank in range(size)]  # type: ignore[misc]
    addresses = [heart.address for heart in hearts]
    for rank in alive:
        hearts[rank].start(addresses)
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
    assert [lost.rank if lost else None for lost in found] == [silent] * 3
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
            hearts[rank]._on_lost = lambda lost: told.append(lost.rank)
        assert hearts[0].lost(SOON)
        assert hearts[2].lost(SOON)
    assert told == [1, 1]
