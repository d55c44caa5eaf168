"""Tensors that require gradients and are no parameters of a stage are rejected, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.engine.engine import Engine  # noqa: E402
from everstep.pipeline.engine.options import EngineOptions  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.placement import complete_placement  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from everstep.pipeline.graph import stage_graph  # noqa: E402
from everstep.pipeline.schedules import lower_schedule, make_schedule  # noqa: E402
from everstep.pipeline.transport.base import Transport  # noqa: E402
from tests.pipeline.inprocess import Fabric  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
OUTSIDE = torch.ones(4, requires_grad=True)


class Layer(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change

    def forward(self, x: Any) -> Any:
        return self.change(self.layer(x))


def own_leaf(x: Any) -> Any:
    """As a penalty on gradients has it."""
    return x * torch.ones(4, device=x.device).requires_grad_()


def squared(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def step(change: Callable[[Any], Any], loss: Any = squared, x: Any = X, recompute: tuple[int, ...] = ()) -> None:
    def work(transport: Transport) -> None:
        found = trace_model(nn.Sequential(nn.Linear(4, 4), Layer(change), nn.Linear(4, 4)), X)
        stage_of = complete_placement(found.graph, {"2": 1})
        graph = stage_graph(found.graph, stage_of)
        schedule = lower_schedule(make_schedule("interleaved", 2, 1, 4, frozenset()), graph)
        options = EngineOptions(recompute=frozenset(recompute))
        engine = Engine(dict(enumerate(split_model(found, stage_of))), schedule, graph, transport, loss, options)
        for _ in range(2):
            engine.step({"input": x}, X)

    Fabric(1).run(work)


@pytest.mark.parametrize("recompute", [(), (0, 1)])
def test_a_tensor_that_learns_and_is_no_parameter_is_refused(recompute: tuple[int, ...]) -> None:
    with pytest.raises(PipelineError, match=r"shape \(4,\) requires gradients in stage 0, .*nn\.ParameterList"):
        step(lambda x: x * OUTSIDE, recompute=recompute)
    with pytest.raises(PipelineError, match=r"shape \(4,\) requires gradients in stage 1, .*a loss that learns"):
        step(torch.tanh, lambda output, target: squared(output * OUTSIDE, target), recompute=recompute)


def test_a_leaf_that_a_forward_makes_is_its_own_affair() -> None:
    step(own_leaf)
    step(lambda x: x * OUTSIDE.detach())


def test_a_batch_that_requires_gradients_is_refused_before_anything_is_done() -> None:
    with pytest.raises(PipelineError, match=r"a tensor of its batch requires gradients.*detach"):
        step(torch.tanh, x=X.clone().requires_grad_())
