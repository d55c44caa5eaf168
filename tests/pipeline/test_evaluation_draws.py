"""Random numbers outside of steps: what evaluations draw, and the generators that scripts shuffle their data with."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.arange(32, dtype=torch.float64)[:, None].expand(32, 4).contiguous()


class Noise(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Draws in evaluation too, as the sampling of a variational autoencoder."""

    def forward(self, x: Any) -> Any:
        return x + torch.randn_like(x)


class Noisy(nn.Module):  # type: ignore[misc]
    """Draws on its first stage only, and hands the numbers of its samples on to the last."""

    def __init__(self, noise: nn.Module) -> None:
        super().__init__()
        self.one, self.noise, self.two = nn.Linear(4, 4), noise, nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        hidden = self.noise(torch.cat([self.one(x / 32).tanh(), x[:, :1]], 1))
        return {"output": self.two(hidden[:, :4]), "number": hidden[:, 4]}


_APART: list[float] = []


def _loss(output: Any, targets: Any) -> Any:
    _APART.append(float((output["number"].detach() - targets[:, 0]).abs().max()))
    return (output["output"] - targets / 32).square().mean()


def _make(noise: nn.Module, **engine: Any) -> Any:
    torch.manual_seed(0)
    return pipeline(
        Noisy(noise).double(),
        X[:8],
        _loss,
        targets=X[:8],
        microbatches=2,
        plan=PlanOptions(costs="counted", stage_of={"two": 1}),
        engine=EngineOptions(heartbeat=None, **engine),
    )


def _train_epochs(rank: int) -> list[float]:
    found = []
    # Noise draws in each mode; a dropout where batch normalisation is evaluated in training, to find its statistics.
    for noise, training in ((Noise(), False), (nn.Dropout(1e-9), True)):
        with _make(noise) as run:
            loader = DataLoader(TensorDataset(X), batch_size=8, shuffle=True)
            for _ in range(3):
                _APART.clear()
                for (x,) in loader:
                    run.step(x, x)
                found += _APART
                run.train(training)
                run.evaluate(X[:8], X[:8])
                run.train()
    return found


def test_a_script_shuffles_alike_on_all_ranks_after_an_evaluation_in_which_one_stage_draws() -> None:
    """Else the first stage reads other samples than those to which the last has the targets."""
    first, last = ranks.run(2, _train_epochs)
    assert not first
    assert len(last) >= 2 * 3 * 4 * 2  # and some more where samples are compared
    assert max(last) < 8  # noise, and not the distance of two samples of other batches


def _evaluate(rank: int) -> list[Any]:
    with _make(Noise()) as run:
        run.eval()
        losses = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            losses += [run.evaluate(X[:8], X[:8]).loss for _ in range(2)]
        drawn = torch.initial_seed(), float(torch.rand(()))
    return [*losses, drawn]


def test_each_evaluation_draws_other_numbers_and_the_same_after_the_same_seed() -> None:
    one, other = ranks.run(2, _evaluate)
    assert one == other
    first, second, again, once_more, *more, _ = one
    assert (first, second) == (again, once_more)
    assert len({first, second, *more}) == 4


def _hold(rank: int) -> list[bool]:
    found = []
    for costs in ("counted", "measured"):
        torch.manual_seed(3)
        plan = PlanOptions(costs=costs, stage_of={"two": 1})
        model = Noisy(nn.Dropout(0.5)).double()
        before = torch.get_rng_state()
        with pipeline(model, X[:8], _loss, targets=X[:8], plan=plan, engine=EngineOptions(heartbeat=None)) as run:
            found.append(torch.equal(before, torch.get_rng_state()))
            run.step(X[:8], X[:8])
            run.eval()
            run.evaluate(X[:8], X[:8])
        found.append(torch.equal(before, torch.get_rng_state()))
    return found


def test_default_generators_stay_where_they_are_through_pipeline_steps_and_evaluations_that_draw_nothing() -> None:
    assert ranks.run(2, _hold) == [[True] * 4] * 2
