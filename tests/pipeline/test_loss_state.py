"""A loss that goes on from call to call is refused where a batch is cut, and left alone before training where not."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.loss_state import Switches  # noqa: E402
from everstep.pipeline.meeting_samples import FirstLook  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).view(8, 4)
BATCHES = [(X * (step + 1), X.flip(0) - step) for step in range(3)]


class Centred(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Takes a running mean from what it is given, as losses of self-distillation do."""

    centre: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4, dtype=torch.float64))
        self.calls, self.seen = 0, list[float]()

    def forward(self, output: Any, target: Any) -> Any:
        found = (output - self.centre - target).square().mean()
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        self.calls += 1
        self.seen.append(found.item())
        return found


class Annealed:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Any, target: Any) -> Any:
        self.calls += 1
        return (output - target).square().mean() * self.calls

    def compute(self, output: Any, target: Any) -> Any:
        return self(output, target)


class Noisy(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.sums = torch.Generator(), list[float]()

    def forward(self, output: Any, target: Any) -> Any:
        noise = torch.rand(output.shape, generator=self.generator, dtype=output.dtype) + torch.rand_like(output)
        found = (output - target + noise * random.random()).square().mean()
        self.sums.append(found.item())  # what it keeps changes nothing
        return found


def _make_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


LOSSES: dict[str, Any] = {"buffer": Centred, "count": Annealed, "method": lambda: Annealed().compute, "noise": Noisy}


def _train(rank: int, microbatches: int, with_targets: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in LOSSES.items():
        loss, losses = make(), []
        try:
            with pipeline(
                _make_model(),
                X,
                loss,
                targets=X if with_targets else None,
                microbatches=microbatches,
                schedule="zb-v",  # the first process, which looks at the loss, has the last stage too
                plan=PlanOptions(stage_of={"0": 0, "1": 1, "2": 2, "4": 3}, costs="counted"),
                engine=EngineOptions(heartbeat=20.0),
            ) as run:
                for x, y in BATCHES:
                    losses.append(run.step(x, y).loss)
                found[name] = losses
        except PipelineError as error:
            found[name] = str(error)
        except Exception as error:  # of a rank that hears of it
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("with_targets", [True, False])
def test_a_loss_that_goes_on_from_what_it_has_kept_is_refused_where_a_batch_is_cut(with_targets: bool) -> None:
    for found in ranks.run(2, _train, 2, with_targets):
        for name in ("buffer", "count", "method"):
            assert "when it is called again with the same output and targets" in found[name], found[name]
            assert "2 times a batch" in found[name]
        assert len(found["noise"]) == len(BATCHES)


def test_where_a_batch_is_not_cut_it_starts_as_the_script_made_it() -> None:
    expected: dict[str, list[float]] = {}
    for name in ("buffer", "count", "method"):
        model, loss = _make_model(), LOSSES[name]()
        expected[name] = [loss(model(x), y).item() for x, y in BATCHES]
    for found in ranks.run(2, _train, 1, True):
        for name, wanted in expected.items():
            assert found[name] == pytest.approx(wanted, rel=1e-10), name


class Recording(nn.Module):  # type: ignore[misc]
    """Keeps what does not change its value, and draws what does not either."""

    seen: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.sizes, self.generator = 0, list[int](), torch.Generator().manual_seed(0)

    def forward(self, output: Any, target: Any) -> Any:
        random.random()
        torch.rand(3, generator=self.generator), torch.rand(3)
        self.calls += 1
        self.seen += len(output)
        self.sizes.append(len(output))
        return (output - target).square().mean()


def test_where_a_loss_is_looked_at_in_the_first_step_it_and_random_numbers_go_on_as_after_one_call() -> None:
    found: list[Any] = []
    for is_looked_at in (False, True):
        loss = Recording()
        torch.manual_seed(0)
        random.seed(0)
        (FirstLook(loss, None, 2) if is_looked_at else loss)(X, X + 1)
        found.append((loss.calls, loss.sizes, float(loss.seen), random.random(), float(torch.rand(()))))
        found[-1] += (float(torch.rand((), generator=loss.generator)),)
    assert found[0] == found[1]


def test_what_is_switched_on_in_one_of_several_like_layers_of_a_loss_is_told_once() -> None:
    loss = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    switches = Switches(loss)
    assert not switches.take_changes()
    loss[1].num_batches_tracked += 1
    assert [switches.take_changes() for _ in range(2)] == [True, False]
