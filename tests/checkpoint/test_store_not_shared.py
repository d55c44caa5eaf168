"""Nodes with stores that they do not share train on, and are told by the first save which nodes these are."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

pytest.importorskip("torch")

from everstep.checkpoint.publish import attempts
from everstep.checkpoint.save.outcomes import SaveFailed
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session

pytestmark = pytest.mark.torch


def saves_elsewhere(rank: int, folder: Path, is_anothers: bool) -> list[str]:
    os.environ["GROUP_RANK"] = str(rank)
    if is_anothers and rank == 1:  # what an earlier job has left on this node
        attempts.run_of(PosixStore(folder / "1" / "store"))
    told: list[str] = []
    ckpt = session(folder / str(rank), directory=folder / f"memory-{rank}", commit_timeout=60.0)
    ckpt.on("stalled", lambda event: told.append(str(event)))
    ckpt.on("failed", lambda event: told.append(str(event)))
    ckpt.track(model=Model())
    ckpt.save(1)  # it is no error
    with pytest.raises(SaveFailed):
        ckpt.wait(3.0)
    ckpt.close(wait=False)
    return told


@pytest.mark.parametrize("is_anothers", [False, True])
def test_nodes_that_do_not_share_their_store_are_named_on_all_ranks_at_the_first_save(
    folder: Path, is_anothers: bool
) -> None:
    for told in run(2, saves_elsewhere, folder, is_anothers):
        named = next(each for each in told if "node 1" in each)
        here = socket.gethostname()
        assert f"{folder / '1' / 'store'}: node 1 ({here}) does not see in it what node 0 ({here}) has written" in named
        assert "give all nodes one store that they share" in named
