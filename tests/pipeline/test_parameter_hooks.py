"""Hooks on parameters are called once a step, with the gradient that one process would give them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.check import compare_gradients
from everstep.pipeline.frontend.materialise import materialise_stages
from everstep.pipeline.frontend.split import split_model
from everstep.pipeline.frontend.trace import trace_model
from everstep.pipeline.transport.base import Transport
from tests.pipeline.inprocess import Fabric
from tests.pipeline.models import CASES, next_words
from tests.pipeline.training import Setting, batch_of, engine_of, share

pytestmark = pytest.mark.torch


def clamp(gradient: Any) -> Any:
    """Return something else for a gradient than the sum of what it returns for its parts."""
    return gradient.clamp(-1e-3, 1e-3)


def double(parameter: Any) -> None:
    """Change the gradient after `clamp`."""
    parameter.grad.mul_(2)


@pytest.mark.parametrize(
    ("schedule", "stages", "replicas", "precision"),
    [("1f1b", 2, 2, "full"), ("zb-v", 4, 1, "full"), ("zb-h1", 2, 1, "fp16")],
)
def test_hooks_hear_once_of_the_gradient_of_the_mean_before_it_is_clipped(
    schedule: str, stages: int, replicas: int, precision: str
) -> None:
    dtype = torch.float64 if precision == "full" else torch.float32
    setting = Setting("gpt", schedule, stages, 2, replicas=replicas, dtype=dtype)  # its embedding is tied
    options = EngineOptions(clip=0.01, precision=precision)

    def work(transport: Transport) -> tuple[dict[str, Any], float | None, set[int]]:
        engine, heard = engine_of(setting, transport, options=options), Counter[str]()
        for name, parameter in engine.parameters.named.items():
            parameter.register_hook(lambda gradient, name=name: heard.update([name]))
            parameter.register_hook(clamp)
            parameter.register_post_accumulate_grad_hook(double)
        for number in range(2):  # of which the first is added up with the second: one step
            mine = share(setting, transport.replica, batch_of(setting, number))
            output = engine.step(mine.inputs, mine.targets, last=number == 1)
        found = {name: each.grad.clone() for name, each in engine.parameters.named.items()}
        return found, output.norm, set(heard.values())

    model = CASES["gpt"].build(dtype=dtype)
    sums = [next_words(model(**batch.inputs), batch.targets) for batch in (batch_of(setting, 0), batch_of(setting, 1))]
    (sum(total for total, _ in sums) / sum(count for _, count in sums)).backward()
    for parameter in model.parameters():
        parameter.grad = 2 * clamp(parameter.grad)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    close = {"rtol": 1e-9, "atol": 1e-12} if precision == "full" else {"rtol": 0.1, "atol": 1e-4}
    for found, seen, heard in Fabric(2, replicas).run(work):
        assert heard == {1}
        assert seen == pytest.approx(norm.item(), rel=close["rtol"])
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], **close)


def test_copies_of_a_parameter_draw_the_same_noise_in_their_hooks() -> None:
    setting = Setting("gpt", "1f1b", 2, 2, replicas=2)

    def work(transport: Transport) -> dict[str, Any]:
        engine = engine_of(setting, transport)
        for parameter in engine.parameters.own:
            parameter.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        mine = share(setting, transport.replica, batch_of(setting, 0))
        engine.step(mine.inputs, mine.targets)
        shared = engine.parameters.shared
        return {name: each.grad for name, each in (engine.parameters.named | shared).items()}

    seen: dict[str, Any] = {}
    for found in Fabric(2, 2).run(work):
        for name, gradient in found.items():
            assert torch.equal(seen.setdefault(name, gradient), gradient), name


def test_a_hook_that_is_removed_hears_no_more_and_one_that_gives_another_shape_is_refused() -> None:
    setting = Setting("mlp", "1f1b", 1, 1)

    def work(transport: Transport) -> int:
        engine, heard = engine_of(setting, transport), list[Any]()
        batch, first = batch_of(setting, 0), engine.parameters.own[0]
        handle = first.register_hook(heard.append)
        engine.step(batch.inputs, batch.targets)
        handle.remove()
        engine.step(batch.inputs, batch.targets)
        first.register_hook(lambda gradient: gradient.sum())
        with pytest.raises(PipelineError, match=r"a hook of parameter '0.weight' returned a tensor of shape \(\)"):
            engine.step(batch.inputs, batch.targets)
        return len(heard)

    assert Fabric(1).run(work) == [1]


def test_hooks_are_not_called_by_checks_and_stay_with_a_parameter_that_gets_its_data() -> None:
    case = CASES["mlp"]
    batch, model, heard = case.example(dtype=torch.float32), case.build(dtype=torch.float32), list[Any]()
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    model.get_parameter("0.weight").register_hook(heard.append)
    found = split_model(trace_model(model, batch.inputs), {"2": 1})
    compare_gradients(model, found, batch.inputs, lambda output: output.sum())
    assert not heard
    with torch.device("meta"):
        empty = case.factory()
    empty.get_parameter("0.weight").register_hook(heard.append)
    first, _ = split_model(trace_model(empty, batch.inputs), {"2": 1})
    materialise_stages([first], weights)
    first.module.get_parameter("0.weight").sum().backward()
    assert len(heard) == 1
