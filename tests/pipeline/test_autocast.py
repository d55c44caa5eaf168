"""Code that reads types does the same in a stage as in one process, wherever the model is cut under autocast."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
TARGET = X.flip(0)
# Between two operations of a layer, and between layers.
CUTS: tuple[dict[str, int], ...] = ({"1.second": 1}, {"1.norm": 1}, {"2": 1}, {"2.second": 1})


class Reading(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Casts to the types that it finds, and asks whether it is under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        scores = self.norm(hidden.float()).softmax(-1).to(hidden.dtype)
        made = torch.zeros_like(hidden)
        made.index_add_(0, torch.arange(x.shape[0]), self.second(scores).to(hidden.dtype))
        return x + (made * (2 if torch.is_autocast_enabled("cpu") else 3)).to(x.dtype)


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Reading(), Reading(), nn.Linear(6, 6))


def squared(output: Any, target: Any) -> Any:
    return (output.float() - target).square().mean()


def _cut(rank: int) -> list[dict[str, Any]]:
    found = []
    for stage_of in CUTS:
        with pipeline(
            model(),
            X,
            squared,
            microbatches=2,
            plan=PlanOptions(stage_of=stage_of, costs="counted"),
            engine=EngineOptions(precision="bf16", heartbeat=None),
        ) as run:
            run.step(X, TARGET)
            found.append({name: each.grad for name, each in run.named_parameters()})
    return found


def test_a_cut_takes_the_types_that_one_process_has_under_autocast() -> None:
    alone = model()
    for part in (slice(0, 4), slice(4, 8)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = squared(alone(X[part]), TARGET[part]) / 2
        loss.backward()
    for one, other in zip(*ranks.run(2, _cut), strict=True):
        for name, each in alone.named_parameters():
            torch.testing.assert_close((one | other)[name], each.grad, rtol=1e-5, atol=1e-7, msg=name)


def _entered(rank: int) -> list[str]:
    told = []
    how: dict[str, Any] = {"stage_of": {"2": 1}, "microbatches": 2, "costs": "counted", "heartbeat": None}
    with pipeline(model(), X, squared, **group_options(**how)) as run:
        for act in (run.step, run.evaluate):
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(PipelineError) as caught:
                act(X, TARGET)
            told.append(str(caught.value))
        run.step(X, TARGET)  # nothing was begun
    with torch.autocast("cpu", torch.bfloat16):
        run = pipeline(model(), X, squared, **group_options(**how))
    with run:
        with pytest.raises(PipelineError) as caught:
            run.step(X, TARGET)
        told.append(str(caught.value))
        with torch.autocast("cpu", torch.bfloat16):
            run.step(X, TARGET)
    return told


def test_a_step_under_another_autocast_than_the_call_is_refused_with_what_to_do() -> None:
    for step, evaluation, outside in ranks.run(2, _entered):
        assert "the step is inside torch.autocast with torch.bfloat16, but pipeline() was called outside of" in step
        assert step == evaluation
        assert "EngineOptions(precision='bf16')" in step
        assert "the step is outside of torch.autocast, but pipeline() was called inside torch.autocast with" in outside


def _train(rank: int, how: str) -> list[float]:
    around = torch.autocast("cpu", torch.bfloat16, enabled=how != "option")
    precision = "full" if how == "script" else "bf16"
    engine, losses = EngineOptions(precision=precision, heartbeat=None), []
    plan = PlanOptions(stage_of={"2": 1}, costs="counted")
    with around, pipeline(model(), X, squared, microbatches=2, plan=plan, engine=engine) as run:
        for _ in range(2):
            losses.append(run.step(X, TARGET).loss)
            for each in run.parameters():
                each.data.sub_(each.grad, alpha=0.2)  # which torch does not count as a write
            losses.append(run.evaluate(X, TARGET).loss)
    return losses


def test_a_script_in_one_autocast_for_all_of_its_steps_trains_the_weights_of_each() -> None:
    """Autocast keeps the copies of weights until its scope ends; a pipeline is a scope too, which a script enters with
    it."""
    alone, wanted = model(), []
    for _ in range(3):
        alone.zero_grad()
        total = 0.0
        for part in (slice(0, 4), slice(4, 8)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = squared(alone(X[part]), TARGET[part]) / 2
            loss.backward()
            total += loss.item()
        wanted += [total] * 2
        for each in alone.parameters():
            each.data.sub_(each.grad, alpha=0.2)
    for how in ("script", "both", "option"):
        for losses in ranks.run(2, _train, how):
            assert losses == pytest.approx(wanted[1:5], rel=1e-5), how
