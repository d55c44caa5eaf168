"""A run with fewer slots than the one before, and more ranks on the node, saves while a slot of that one is needed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import everstep  # noqa: E402
from everstep.checkpoint.slots.slots import Slots  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

EARLIER, LATER = 2, 1  # slots


def train(rank: int, folder: Path, slots: int, is_killed: bool = False) -> int:
    model = torch.nn.Linear(8, 8)
    with everstep.checkpointer(
        folder / "store",
        policy="wait",
        memory=everstep.MemoryOptions(directory=folder / "memory", slots=slots),
        times=everstep.TimeOptions(timeout=60.0, commit_timeout=30.0, linger=60.0),
    ) as ckpt:
        start = ckpt.restore(model=model).step
        for step in (start + 1, start + 2):
            ckpt.save(step)
            ckpt.wait()
        if is_killed:  # its slots stay
            os.kill(os.getpid(), signal.SIGKILL)
        return start + 2


def test_a_slot_of_the_run_before_that_is_read_stands_in_the_way_of_no_save(tmp_path: Path) -> None:
    ranks.run(1, train, tmp_path, EARLIER, True, dies=[0])
    left = Slots(tmp_path / "memory")[1]
    with left.reading():  # as a restore does
        assert ranks.run(2, train, tmp_path, LATER) == [4, 4]
    assert everstep.load(tmp_path / "store").step == 4
