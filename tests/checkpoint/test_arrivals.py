"""A rank that dies before a call of a session is named by all others, which wait for it in a collective."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

import everstep
from everstep.checkpoint.errors import RankLost
from everstep.checkpoint.ranks import topology
from everstep.checkpoint.session import checkpointer
from tests.checkpoint import ranks
from tests.checkpoint.sessions import Model, session

pytestmark = pytest.mark.torch


def come_without(rank: int, folder: Path, call: str, dying: int) -> tuple[tuple[int, ...], str]:
    ckpt: Any = session(folder)
    dist.barrier()
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLost) as caught:
        getattr(ckpt, call)(model=Model())
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("call", ["restore", "track"])
@pytest.mark.parametrize("dying", [0, 1, 2])
def test_a_rank_that_dies_right_before_a_call_is_named_by_the_others(call: str, dying: int, tmp_path: Path) -> None:
    for found in ranks.run(3, come_without, tmp_path, call, dying, dies=[dying]):
        if found is not None:
            named, words = found
            assert named == (dying,)
            assert f"{call}()" in words
            assert words.endswith("all ranks have to be started again")


@pytest.mark.parametrize(("world", "dying"), [(4, 2), (5, 0), (5, 1), (5, 4)])
def test_a_rank_that_dies_is_named_by_those_that_are_not_connected_with_it_too(
    world: int, dying: int, tmp_path: Path
) -> None:
    """In a ring most ranks hear of it only when those between them end, and would name one of these."""
    found = ranks.run(world, come_without, tmp_path, "restore", dying, dies=[dying])
    assert {rank: each and each[0] for rank, each in enumerate(found)} == {
        rank: None if rank == dying else (dying,) for rank in range(world)
    }


def open_without(rank: int, folder: Path, moment: str, dying: int) -> tuple[tuple[int, ...], str, bool]:
    """Return what is told of a rank that dies while sessions are made, and whether their group is closed."""
    module, name = {"places": (checkpointer, "open_places"), "topology": (topology, "find_topology")}[moment]
    method = getattr(module, name)

    def die(*args: Any) -> Any:
        if rank == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args)

    setattr(module, name, die)
    with pytest.raises(RankLost) as caught:
        session(folder)
    return caught.value.ranks, str(caught.value), dist.distributed_c10d._world.pg_map.keys() == {dist.group.WORLD}


@pytest.mark.parametrize("moment", ["places", "topology"])
@pytest.mark.parametrize("dying", [0, 1, 3])
def test_a_rank_that_dies_while_sessions_are_made_is_named_and_their_group_closed(
    moment: str, dying: int, tmp_path: Path
) -> None:
    found = ranks.run(4, open_without, tmp_path, moment, dying, dies=[dying])
    assert [each and each[0] for each in found] == [None if rank == dying else (dying,) for rank in range(4)]
    assert all(each[2] for each in found if each)


def fail_to_open(rank: int) -> bool:
    with pytest.raises(ValueError, match="no store serves"):
        everstep.checkpointer("gopher://bucket")
    return bool(dist.distributed_c10d._world.pg_map.keys() == {dist.group.WORLD})


def test_a_session_that_cannot_be_made_leaves_no_group_open() -> None:
    assert ranks.run(2, fail_to_open) == [True, True]
