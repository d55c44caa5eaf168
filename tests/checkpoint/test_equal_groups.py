"""Groups of an optimizer may have the same options, from the start or by and by."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from tests.checkpoint.sessions import session, steps_in

pytestmark = pytest.mark.torch


class Run:
    """A model of three layers, whose optimizer has a group for each."""

    def __init__(self, groups: int) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
        self.optimizer = torch.optim.AdamW([{"params": list(layer.parameters())} for layer in self.model[:groups]])

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.full((2, 3), float(number))).square().sum().backward()
        self.optimizer.step()


def test_groups_with_equal_options_are_saved_and_go_on(folder: Path) -> None:
    meant, resumed = Run(groups=3), Run(groups=3)
    with session(folder, every_steps=1, policy="wait") as ckpt:
        ckpt.track(model=meant.model, optimizer=meant.optimizer)
        meant.step(1)
        ckpt.step(1)
    with session(folder, every_steps=1, policy="wait") as ckpt:
        assert ckpt.restore(model=resumed.model, optimizer=resumed.optimizer).step == 1
        for run in (meant, resumed):
            run.step(2)
    assert all(map(torch.equal, meant.model.parameters(), resumed.model.parameters()))
    assert meant.optimizer.state_dict()["param_groups"] == resumed.optimizer.state_dict()["param_groups"]


def test_a_group_that_comes_later_and_one_that_becomes_equal_are_saved(folder: Path) -> None:
    run = Run(groups=2)
    run.optimizer.param_groups[1]["lr"] = 0.5
    with session(folder, every_steps=1, policy="wait", keep_last=10) as ckpt:
        ckpt.track(model=run.model, optimizer=run.optimizer)
        run.step(1)
        ckpt.step(1)
        run.optimizer.add_param_group({"params": list(run.model[2].parameters())})
        run.step(2)
        ckpt.step(2)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        run.step(3)
        ckpt.step(3)
    assert steps_in(folder) == [1, 2, 3]
