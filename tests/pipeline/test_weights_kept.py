"""Weights that a forward writes are trained from where the script left them, whatever is run before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from everstep.pipeline.frontend.check import as_before
from everstep.pipeline.profile import lend_weights

pytestmark = pytest.mark.torch


class _Shrinking(nn.Linear):  # type: ignore[misc]
    """A layer whose forward writes its own weight."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__(4, 4)
        self.write = write

    def forward(self, given: Any) -> Any:
        with torch.no_grad():
            self.write(self.weight)
        return super().forward(given)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda weight: weight.mul_(0.9),
    "by data": lambda weight: weight.data.mul_(0.9),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_a_check_before_training_leaves_weights_that_a_forward_writes(write: str) -> None:
    model = nn.Sequential(_Shrinking(WRITES[write]), nn.ReLU(), nn.Linear(4, 4))
    before = [each.detach().clone() for each in model.parameters()]
    with as_before(model):
        model(torch.randn(2, 4)).sum().backward()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("write", list(WRITES))
def test_a_measurement_leaves_weights_that_a_forward_writes(write: str) -> None:
    model = _Shrinking(WRITES[write])
    before, own = model.weight.detach().clone(), model.weight
    with lend_weights(model, torch.device("cpu")):
        model(torch.randn(2, 4))
    assert model.weight is own
    assert torch.equal(model.weight, before)


def test_weights_that_nobody_writes_are_not_written_to_keep_them() -> None:
    model = nn.Linear(4, 4)
    version = model.weight._version
    with as_before(model):
        model(torch.randn(2, 4))
    assert model.weight._version == version
