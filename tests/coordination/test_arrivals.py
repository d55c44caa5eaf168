"""Ranks that do not come to a meeting are named, before there is any group."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from everstep.coordination.arrivals import RollCall, open_group_of_all
from everstep.coordination.errors import ErrorTypes, RankLost
from tests.checkpoint.ranks import run

pytestmark = pytest.mark.torch


def meet(rank: int, folder: Path, absent: int, how: str) -> list[list[int]]:
    first = RollCall("meet()", 30.0)
    found = [first.find_missing("came", 30.0)]
    if rank == absent:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        while len(list(folder.iterdir())) < 2:  # the run's own timeout ends it
            time.sleep(0.01)
        return found
    found.append(first.find_missing("left", 1.0))
    (folder / str(rank)).touch()
    return found


@pytest.mark.parametrize("how", ["dies", "stays away"])
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named(absent: int, how: str, tmp_path: Path) -> None:
    found = run(3, meet, tmp_path, absent, how, dies=[absent] if how == "dies" else [])
    assert [each for rank, each in enumerate(found) if rank != absent] == [[[], [absent]]] * 2


def open_without(rank: int, folder: Path, absent: int) -> tuple[tuple[int, ...], str] | None:
    group = open_group_of_all("first()", 30.0, ErrorTypes())
    assert group.gather(rank) == [0, 1, 2]
    if rank == absent:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        return None
    with pytest.raises(RankLost) as caught:
        open_group_of_all("second()", 2.0, ErrorTypes())
    (folder / str(rank)).touch()
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_group_that_a_rank_does_not_open_names_it(absent: int, tmp_path: Path) -> None:
    named, words = (absent,), f"rank {absent} left before second(), or did not come to it in time"
    for rank, found in enumerate(run(3, open_without, tmp_path, absent)):
        assert rank == absent or (found[0] == named and words in found[1])


def meet_in_groups(rank: int, folder: Path) -> list[list[int]]:
    """Rank 0 meets rank 1 in one process group and rank 2, which is new there, in the next one."""
    dist.barrier()  # each has connected to all others: gloo's setup fails where one leaves before
    dist.destroy_process_group()
    found = []
    for other in (1, 2):
        if rank in (0, other):
            number = int(rank != 0)
            dist.init_process_group("gloo", init_method=f"file://{folder / str(other)}", rank=number, world_size=2)
            found.append(open_group_of_all("meet()", 10.0, ErrorTypes()).gather(rank))
            dist.barrier()
            dist.destroy_process_group()
    return found


def test_a_process_that_has_been_in_another_group_meets_one_that_is_new(tmp_path: Path) -> None:
    """As where a process that is left begins anew with a replacement for the one that was lost."""
    assert run(3, meet_in_groups, tmp_path) == [[[0, 1], [0, 2]], [[0, 1]], [[0, 2]]]


def test_one_process_waits_for_nobody() -> None:
    assert open_group_of_all("alone()", 30.0, ErrorTypes()).gather(5) == [5]
