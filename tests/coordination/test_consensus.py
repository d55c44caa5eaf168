"""All ranks come to one decision, or know which rank did not."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from everstep.coordination.consensus import Consensus
from everstep.coordination.errors import ErrorTypes, RankLost
from everstep.coordination.group import RankGroup
from everstep.coordination.kv_store import LocalKVStore, SharedKVStore
from tests.checkpoint.ranks import run

pytestmark = pytest.mark.torch


def open_consensus(patience: float = 30.0) -> Consensus:
    group = RankGroup(dist.group.WORLD, ErrorTypes(failed=ValueError))
    store = SharedKVStore.open(group, 30.0)
    return Consensus(store, group.rank, group.size, patience, purpose="while they chose")


def decide_twice(rank: int) -> list[Any]:
    consensus = open_consensus()
    found = [consensus.agree(rank, max)]
    if rank == 2:
        consensus.post("word", "posted")
    found.append(consensus.agree([rank], lambda messages: [each for (each,) in messages]))
    found.append(consensus.read("word"))
    consensus.settle()
    return found


def test_all_ranks_hear_what_rank_0_makes_of_their_messages() -> None:
    assert run(3, decide_twice) == [[2, [0, 1, 2], "posted"]] * 3


def test_one_process_decides_alone() -> None:
    assert Consensus(LocalKVStore(), 0, 1).agree(3, sum) == 3


def dies_before_a_round(rank: int, dying: int) -> tuple[Any, str]:
    consensus = open_consensus(patience=2.0)
    consensus.agree(rank, max)
    dist.barrier()  # all have heard of it
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLost) as caught:
        consensus.agree(rank, max)
    consensus.settle()
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_is_named_on_all_others(dying: int) -> None:
    for rank, found in enumerate(run(3, dies_before_a_round, dying, dies=[dying])):
        if rank != dying:
            assert found[0] == (dying,)
            assert "while they chose" in found[1]


def cannot_decide(rank: int) -> str:
    consensus = open_consensus()
    with pytest.raises((ValueError, ZeroDivisionError)) as caught:
        consensus.agree(rank, lambda messages: 1 // 0)
    consensus.settle()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_of_the_decision_is_one_of_all_ranks() -> None:
    assert run(2, cannot_decide) == [
        "ZeroDivisionError: integer division or modulo by zero",
        "ValueError: rank 0 could not decide: ZeroDivisionError: integer division or modulo by zero",
    ]
