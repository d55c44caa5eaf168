"""A loss that differentiates what a model returns through the model is refused, wherever the cut falls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 48, dtype=torch.float64).view(8, 6)


class Hidden(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Returns an activation beside its result, which follows from it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Any) -> Any:
        hidden = self.one(x)
        return self.three(self.two(hidden).tanh()), hidden


def _penalised(output: Any, targets: Any, **options: bool) -> Any:
    result, hidden = output
    loss = (result - targets[:, :3]).square().mean()
    if torch.is_grad_enabled():
        (slope,) = torch.autograd.grad(result.sum(), hidden, create_graph=True, **options)
        loss = loss + slope.square().sum(1).mean()
    return loss


def _penalised_or_not(output: Any, targets: Any) -> Any:
    """Takes no gradient for one of zeros."""
    return _penalised(output, targets, allow_unused=True, materialize_grads=True)


def _of_results(output: Any, targets: Any) -> Any:
    """Differentiates what it has computed itself."""
    result, hidden = output
    error = (result - targets[:, :3]).square()
    (slope,) = torch.autograd.grad(error.sum(), result, create_graph=True) if torch.is_grad_enabled() else (2 * result,)
    return error.mean() + hidden.square().mean() + 0.0 * slope.square().mean()


def _call(rank: int, loss: Callable[..., Any], microbatches: int) -> list[str]:
    said = []
    for stage_of in ({"three": 1}, {"two": 1}):
        options: dict[str, Any] = {"microbatches": microbatches, "engine": EngineOptions(heartbeat=None)}
        try:
            plan = PlanOptions(costs="counted", stage_of=stage_of)
            with pipeline(Hidden(), X, loss, targets=X, plan=plan, **options) as run:
                expected = float(loss(Hidden()(X), X).detach())
                said.append("" if run.step(X, X).loss == pytest.approx(expected) else "another loss")
        except PipelineError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("loss", [_penalised, _penalised_or_not])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_penalty_on_gradients_within_the_model_is_refused_on_all_ranks(loss: Any, microbatches: int) -> None:
    for said in ranks.run(2, _call, loss, microbatches):
        assert len(said) == 2
        assert all("with the graph of the model" in each and "torch.autograd.grad" in each for each in said)


def test_a_loss_that_differentiates_what_it_computes_itself_is_accepted() -> None:
    assert ranks.run(2, _call, _of_results, 2) == [["", ""]] * 2
