"""All ranks do something and succeed or fail alike; one that dies is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from everstep.coordination.errors import ErrorTypes, RankLost
from everstep.coordination.group import RankGroup
from tests.checkpoint.ranks import run

pytestmark = pytest.mark.torch


class LibraryError(Exception):
    """The base of a library's errors."""


class LibraryRankLost(RankLost, LibraryError):
    """A lost rank, in the terms of a library."""


def open_group() -> RankGroup:
    return RankGroup.open(30.0, ErrorTypes(lost=LibraryRankLost, failed=LibraryError))


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def exchange(rank: int) -> tuple[Any, ...]:
    group = open_group()
    messages = group.gather_bytes(b"x" * rank)
    return (
        group.gather(rank),
        group.broadcast(f"of {rank}"),
        group.any(rank == 1),
        group.any(False),
        group.run_on_all_ranks(lambda: 10 * rank),
        group.run_on_first_rank(lambda: [rank]),
        group.scatter_bytes(None if messages is None else [each + b"!" for each in messages]),
    )


def test_ranks_hear_of_each_other() -> None:
    for rank, found in enumerate(run(3, exchange)):
        assert found == ([0, 1, 2], "of 0", True, False, 10 * rank, [0], b"x" * rank + b"!")


def test_one_process_is_a_group_too() -> None:
    assert exchange_alone() == ([7], 7, True, 7, [7], b"!")
    with pytest.raises(ZeroDivisionError):
        RankGroup(None).run_on_all_ranks(lambda: 1 // 0)


def exchange_alone() -> tuple[Any, ...]:
    group = RankGroup(None)
    assert group.gather_bytes(b"!") == [b"!"]
    group.barrier()
    return (
        group.gather(7),
        group.broadcast(7),
        group.any(True),
        group.run_on_all_ranks(lambda: 7),
        group.run_on_first_rank(lambda: [7]),
        group.scatter_bytes([b"!"]),
    )


def fail_on_one(rank: int, folder: Path) -> tuple[str, str]:
    def work() -> int:
        return 1 if rank != 1 else int((folder / "missing").read_text())

    return caught(lambda: open_group().run_on_all_ranks(work))


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    first, second, third = run(3, fail_on_one, tmp_path)
    assert second[0] == "FileNotFoundError"
    assert first == third == ("LibraryError", f"rank 1: {second[1]}")


def fail_on_first(rank: int) -> tuple[str, str]:
    return caught(lambda: open_group().run_on_first_rank(lambda: 1 // 0))


def test_what_fails_on_the_first_rank_fails_on_all() -> None:
    assert run(2, fail_on_first) == [
        ("ZeroDivisionError", "integer division or modulo by zero"),
        ("LibraryError", "integer division or modulo by zero"),
    ]


def die_before(rank: int, dying: int) -> tuple[tuple[int, ...], bool]:
    group = open_group()
    group.barrier()
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)

    def meet() -> None:
        came = group.gather_bytes(b"")
        group.scatter_bytes(None if came is None else [b""] * len(came))

    with pytest.raises(LibraryError) as error:
        meet()
    assert isinstance(error.value, RankLost)
    with pytest.raises(RankLost):
        group.gather(rank)
    return error.value.ranks, "all ranks have to be started again" in str(error.value)


@pytest.mark.parametrize("dying", [1, 2])
def test_a_rank_that_dies_is_named_on_all_others(dying: int) -> None:
    found = run(3, die_before, dying, dies=[dying])
    assert found == [None if rank == dying else ((dying,), True) for rank in range(3)]


def close_twice(rank: int) -> bool:
    group = RankGroup.open(30.0)
    group.gather(None)  # a rank that closes while the other still connects would end that
    group.close()
    group.close()
    other = RankGroup.open(30.0)
    other.gather(None)
    dist.destroy_process_group()
    other.close()
    return True


def test_a_group_is_closed_once_and_goes_with_the_default_group() -> None:
    assert run(2, close_twice) == [True, True]
