"""A script's default device is its own affair: what a pipeline makes for itself is where its values are."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import pipeline  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402

pytestmark = pytest.mark.torch


def squares(output: Any, targets: Any) -> Any:
    return (output - targets).square().sum(), output.numel()


def _trains(rank: int, costs: Any, default: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    x, y = torch.rand(8, 4), torch.rand(8, 4)
    torch.set_default_device(default)
    usual: dict[str, Any] = {"microbatches": 2, "stages": 2, "heartbeat": 60.0, "device": "cpu"}
    with pipeline(model, x, squares, targets=y, **group_options(costs=costs, precision="bf16", **usual)) as run:
        optimizer = torch.optim.SGD(run.groups(), lr=0.1)
        losses = []
        for _ in range(2):
            losses.append(run.step(x, y).loss)
            run.clip_grad_norm_(1.0)
            optimizer.step()
        run.eval()  # in training, an evaluation draws numbers that depend on the cut, and the cut may be measured
        return [*losses, run.evaluate(x, y).loss]


@pytest.mark.parametrize(("world", "costs"), [(2, "measured"), (4, "counted")])
def test_a_pipeline_does_not_depend_on_the_default_device(world: int, costs: str) -> None:
    expected = ranks.run(world, _trains, costs, "cpu")
    assert ranks.run(world, _trains, costs, "meta") == expected
