"""Ranks that do not come to a meeting are named, before there is any group."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

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


def test_one_process_waits_for_nobody() -> None:
    assert open_group_of_all("alone()", 30.0, ErrorTypes()).gather(5) == [5]
