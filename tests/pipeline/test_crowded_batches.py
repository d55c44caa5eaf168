"""Parts that have room for so many samples only train otherwise in micro-batches, though a few do not show it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as f  # noqa: E402

from everstep.pipeline import pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402

pytestmark = pytest.mark.torch


class Experts(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Experts of which each takes so many samples of a batch, and leaves others as they are."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.capacity = capacity

    def forward(self, x: Any) -> Any:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        result = x
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().flatten()[: self.capacity]
            result = result.index_add(0, own, expert(x[own]) * weight[own, None])
        return result


def make_model(capacity: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Experts(capacity), nn.Linear(6, 6)).double()


def mean_square(output: Any, targets: Any) -> Any:
    return (output - targets).square().mean()


def of_the_hardest(output: Any, targets: Any) -> Any:
    each = (output - targets).square().mean(1)
    return each.topk(5).values.mean()


def slowly_apart(output: Any, targets: Any) -> Any:
    """One that hardly shows what a model makes of single samples, as cross entropy before training."""
    return 1000.0 + f.smooth_l1_loss(output, targets)


def _call(rank: int, capacity: int, loss: Any, knows_targets: bool, microbatches: int) -> str:
    random = torch.Generator().manual_seed(3)
    x, targets = (torch.randn(16, 6, generator=random, dtype=torch.float64) for _ in range(2))
    how: dict[str, Any] = {"heartbeat": None, "microbatches": microbatches, "costs": "counted"}
    given = {"targets": targets} if knows_targets else {}
    try:
        with pipeline(make_model(capacity), x, loss, schedule="1f1b", **given, **group_options(**how)) as run:
            return f"loss {run.step(x, targets).loss:.12g}"
    except PipelineError as error:
        return str(error)


@pytest.mark.parametrize("knows_targets", [True, False])
def test_experts_with_a_capacity_that_only_a_batch_exceeds_are_refused(knows_targets: bool) -> None:
    for loss in (mean_square, slowly_apart):
        for message in ranks.run(2, _call, 3, loss, knows_targets, 2):
            assert "16 samples is" in message
            assert "they meet in the model (1)" in message


def test_a_loss_of_the_hardest_samples_is_refused_where_it_needs_more_than_a_few() -> None:
    for message in ranks.run(2, _call, 16, of_the_hardest, True, 2):
        assert "the loss of 16 samples is" in message
        assert "the loss takes them together" in message


def test_experts_with_room_for_all_train_as_in_one_process() -> None:
    random = torch.Generator().manual_seed(3)
    x, targets = (torch.randn(16, 6, generator=random, dtype=torch.float64) for _ in range(2))
    loss = float(mean_square(make_model(16)(x), targets))
    assert ranks.run(2, _call, 16, mean_square, True, 2) == [f"loss {loss:.12g}"] * 2
