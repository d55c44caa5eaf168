"""Ranks of one node fill a slot together: where they do not share its memory, that is told before any training."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from everstep.checkpoint.errors import CheckpointError
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session, steps_in, train

pytestmark = pytest.mark.torch


def open_apart(rank: int, folder: Path, named: str) -> str:
    """Ranks 1 and 2 are of a node of two, and each has a memory of its own."""
    os.environ["GROUP_RANK"] = str((rank + 1) // 2)
    own = folder / str(rank)
    os.environ["EVERSTEP_CHECKPOINT_MEMORY"] = str(own)
    with pytest.raises(CheckpointError) as caught:
        session(folder, directory=own if named == "by the script" else None)
    return str(caught.value)


@pytest.mark.parametrize("named", ["by the script", "by the environment"])
def test_ranks_of_a_node_with_other_memories_are_named_with_what_to_do(named: str, tmp_path: Path) -> None:
    """Before, each had a writer that waited for the other one's part, until the limit of a commit."""
    for told in run(3, open_apart, tmp_path, named):
        assert told.startswith("ranks 1 and 2 are of one node, and their memory for checkpoints is not the same: ")
        assert re.search(rf"{tmp_path}/1\S* on \S+, and {tmp_path}/2\S* on ", told)
        assert "MemoryOptions(directory=…)" in told
        assert "NODE_RANK" in told


def save_by_a_link(rank: int, folder: Path) -> None:
    memory = folder / "memory"
    if rank == 1:
        (folder / "link").symlink_to(folder, target_is_directory=True)
        memory = folder / "link" / "memory"
    model = Model()
    with session(folder, directory=memory, every_steps=2, policy="wait") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 4)


def test_one_memory_may_have_two_names(tmp_path: Path) -> None:
    run(2, save_by_a_link, tmp_path)
    assert steps_in(tmp_path) == [2, 4]
