"""Whatever mode of autograd a script restores in, it trains on as if it had restored in none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch

Mode = Callable[[], AbstractContextManager[None]]
SAVED = 3


class Training:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"sum": torch.zeros(3)}

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "state": self.state}

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.state["sum"] += batch.sum(0)
            losses.append(loss.item())
        return losses


def save(folder: Path) -> list[float]:
    """Return the losses of the steps after the one that is saved."""
    training = Training()
    with session(folder) as ckpt:
        ckpt.restore(**training.objects)
        training.train(range(SAVED))
        ckpt.save(SAVED)
    return training.train(range(SAVED, 6))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_run_that_restores_in_any_mode_trains_on_bit_for_bit(mode: Mode, tmp_path: Path) -> None:
    expected = save(tmp_path)
    for restore in (session(tmp_path).restore, lambda **given: everstep.load_into(tmp_path / "store", **given)):
        training = Training()
        with mode():
            restore(**training.objects)
        assert training.train(range(SAVED, 6)) == expected
    with mode():
        loaded = everstep.load(tmp_path / "store")
    training = Training()
    training.model.load_state_dict(loaded["model"], assign=True)
    training.state = loaded["state"]
    training.train(range(1))


@pytest.mark.parametrize("name", ["model", "state"])
def test_what_was_made_within_inference_mode_is_refused_outside_before_anything_is_touched(
    name: str, tmp_path: Path
) -> None:
    save(tmp_path)
    with torch.inference_mode():
        of_inference = Training().objects[name]
    for restore in (session(tmp_path).restore, lambda **given: everstep.load_into(tmp_path / "store", **given)):
        training = Training()
        before = {key: tensor.clone() for key, tensor in training.model.state_dict().items()}
        with pytest.raises(StateMismatch, match=rf"{name}\.[^ ]+ was made within torch\.inference_mode\(\)"):
            restore(**(training.objects | {name: of_inference}))
        assert all(torch.equal(tensor, before[key]) for key, tensor in training.model.state_dict().items())
        assert training.state["sum"].sum() == 0


def test_a_model_that_was_built_for_inference_stays_one(tmp_path: Path) -> None:
    save(tmp_path)
    expected = everstep.load(tmp_path / "store")["model"]
    with torch.inference_mode():
        model = Training().model
        everstep.load_into(tmp_path / "store", model=model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
