"""Nodes with stores that they do not share hear it at the first save, and not when the time of a commit is over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from everstep.checkpoint import claiming
from everstep.checkpoint.errors import CheckpointError
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session

pytestmark = pytest.mark.torch


def saves_elsewhere(rank: int, folder: Path) -> str:
    os.environ["GROUP_RANK"] = str(rank)
    claiming._SHARED_PATIENCE = 0.5

    def script() -> None:
        with session(folder / str(rank), commit_timeout=3600.0) as ckpt:
            ckpt.track(model=Model())
            ckpt.save(1)

    with pytest.raises(CheckpointError) as raised:
        script()
    return str(raised.value)


def test_nodes_that_do_not_share_their_store_are_told_at_the_first_save(folder: Path) -> None:
    for told in run(2, saves_elsewhere, folder):
        assert f"node 1 does not see in {folder / '1' / 'store'} what rank 0 has written to the store" in told
        assert "all nodes" in told
