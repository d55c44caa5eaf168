"""A loss gives counts without gradients, and something to differentiate; tables that a model keeps beside its modules
are those of a call with data."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.engine.losses import compute_loss  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64).view(8, 8)


def test_a_count_that_learns_is_refused() -> None:
    """A mean over learnt weights has a gradient by its denominator, which a sum of micro-batches has not."""
    weights = torch.ones(4, requires_grad=True)
    values = torch.ones(4, requires_grad=True)
    for loss, weight, words in (
        (lambda output, targets: ((output * weights).sum(), weights.sum()), None, "the count that a loss gives"),
        (lambda output, targets: output.mean(), lambda output, targets: weights.sum(), "EngineOptions.loss_weight"),
    ):
        with pytest.raises(PipelineError, match=rf"{words}.* depends on what learns.*detach"):
            compute_loss(loss, values, None, 4, weight)
    part = compute_loss(lambda output, targets: (output.sum(), weights.detach().sum()), values, None, 4, None)
    assert float(part.count) == 4.0


@functools.cache
def _table(size: int) -> Any:
    return torch.arange(size, dtype=torch.float64)


_TABLES: dict[int, Any] = {}


class Tables(nn.Module):  # type: ignore[misc]
    """Takes what functions and dictionaries of the file keep, which the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Any) -> Any:
        if 8 not in _TABLES:
            _TABLES[8] = torch.linspace(0.0, 1.0, 8, dtype=torch.float64)
        return self.two(self.one(x) * _TABLES[8] + _table(8))


_DETACHED: list[bool] = []


def _squares(output: Any, targets: Any) -> Any:
    output = output.detach() if _DETACHED else output
    return (output - targets[:, :3]).square().mean()


def _train(rank: int) -> list[float]:
    _TABLES.clear()
    _table.cache_clear()
    model = Tables()
    with pipeline(
        model,
        X,
        _squares,
        microbatches=4,
        plan=PlanOptions(stage_of={"two": 1}, costs="counted"),
        engine=EngineOptions(heartbeat=None),
    ) as run:
        found = [run.step(X, X).loss]
        for recompute in (False, True):
            _DETACHED.append(recompute)
            with pytest.raises(PipelineError, match="no loss of the step depends on anything that learns"):
                run.step(X, X)
            _DETACHED.clear()
            found.append(run.step(X, X).loss)  # all may go on
        assert run.engine.steps == 3
    assert type(_TABLES[8]) is torch.Tensor
    return found


def test_tables_have_data_and_a_loss_without_a_graph_is_refused_on_all_ranks() -> None:
    expected = float(_squares(Tables()(X), X))
    for said in ranks.run(2, _train):
        assert said == [pytest.approx(expected)] * 3
