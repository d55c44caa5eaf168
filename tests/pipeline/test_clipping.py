"""The norm of all gradients, whoever has them; and types in which they would become infinite without a word."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import pipeline  # noqa: E402
from everstep.pipeline.engine.clipping import sum_of_powers  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.transport.base import Transport  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402
from tests.pipeline.inprocess import Fabric  # noqa: E402
from tests.pipeline.models import CASES, next_words, squares  # noqa: E402
from tests.pipeline.training import Setting, batch_of, engine_of, share  # noqa: E402

pytestmark = pytest.mark.torch

NORMS = (2.0, 1.0, math.inf)


@pytest.mark.parametrize(("schedule", "stages", "replicas"), [("1f1b", 2, 2), ("zb-v", 4, 1)])
def test_gradients_of_all_ranks_are_clipped_by_one_norm_in_which_each_parameter_counts_once(
    schedule: str, stages: int, replicas: int
) -> None:
    setting = Setting("gpt", schedule, stages, 2, replicas=replicas)  # its embedding is tied

    def work(transport: Transport) -> list[tuple[float, dict[str, Any]]]:
        engine, found = engine_of(setting, transport), []
        mine = share(setting, transport.replica, batch_of(setting, 0))
        for norm_type in NORMS:
            engine.step(mine.inputs, mine.targets)
            assert engine.clip_gradients(math.inf, norm_type) == engine.clip_gradients(1e9, norm_type)
            norm = engine.clip_gradients(0.01, norm_type, error_if_nonfinite=True)
            found.append((float(norm), {name: each.grad.clone() for name, each in engine.parameters.named.items()}))
        engine.step(mine.inputs, mine.targets, last=False)
        with pytest.raises(PipelineError, match=r"end it with step\(…, last=True\) before clipping"):
            engine.clip_gradients(0.01)
        engine.step(mine.inputs, mine.targets)
        with pytest.raises(PipelineError, match=r"0\.01 with norm_type=2 and 0\.02 with norm_type=2"):
            engine.clip_gradients(0.02 if transport.rank else 0.01)
        engine.step(mine.inputs, mine.targets)  # nothing was changed: it goes on
        engine.parameters.own[0].grad.fill_(math.nan)
        with pytest.raises(PipelineError, match="the norm of the gradients is nan"):
            engine.clip_gradients(0.01, error_if_nonfinite=True)
        return found

    batch, every = batch_of(setting, 0), Fabric(2, replicas).run(work)
    for place, norm_type in enumerate(NORMS):
        model = CASES["gpt"].build()
        total, count = next_words(model(**batch.inputs), batch.targets)
        (total / count).backward()
        wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        assert len({found[place][0] for found in every}) == 1
        for found in every:
            norm, gradients = found[place]
            assert norm == pytest.approx(wanted.item(), rel=1e-9)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_of_gradients_of_half_the_width_is_exact_and_finite(dtype: Any) -> None:
    weights = [nn.Parameter(torch.zeros(300, dtype=dtype)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 4096.0)
    assert math.sqrt(sum_of_powers(weights)) == pytest.approx(4096.0 * 30, rel=1e-6)
    assert sum_of_powers(weights, math.inf) == 4096.0


class Casting(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.one, self.two, self.dtype = nn.Linear(4, 4), nn.Linear(4, 4), dtype

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=self.dtype):
            x = self.one(x)
        return self.two(x.float())


def _refused(rank: int) -> tuple[list[str], list[float]]:
    """Return the messages about float16 without a scale; and norms that `run` gives, of all and after clipping."""
    told, x = [], torch.ones(4, 4)
    frozen = nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4))
    how: dict[str, Any] = {"heartbeat": None, "costs": "counted"}
    for model, precision in (
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half(), "fp16"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half()), "full"),
        (frozen, "bf16"),
        (Casting(torch.float16), "full"),
    ):
        with pytest.raises(PipelineError) as caught:
            pipeline(model, x, squares, **group_options(precision=precision, **how))
        told.append(str(caught.value))
    torch.manual_seed(0)
    with pipeline(Casting(torch.bfloat16), x, squares, **group_options(**how)) as run:
        with torch.autocast("cpu", dtype=torch.float16), pytest.raises(PipelineError) as caught:
            run.step(x, x)
        told.append(str(caught.value))
        run.step(x, x)
        norms = [float(run.clip_grad_norm_(1e-3)), float(run.clip_grad_norm_(math.inf))]
    return told, norms


def test_float16_without_a_scale_is_refused_on_all_ranks_and_a_run_clips() -> None:
    (told, norms), other = ranks.run(2, _refused)
    assert (told, norms) == other
    all_of_it, one_of_it, frozen, region, around = told
    assert all_of_it.startswith("parameter '0.weight' is of float16")
    assert one_of_it.startswith("parameter '1.weight' is of float16")
    assert "with 'fp16', frozen parameters may be" in frozen
    assert "enters autocast with float16 itself (around 'one')" in region
    assert "is inside torch.autocast with float16" in around
    assert norms[0] > 1e-3
    assert norms[1] == pytest.approx(1e-3, rel=1e-2)
