"""Before anything is trained: are the stages the model, and are samples alone in their batch?"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend import split_model, trace_model  # noqa: E402
from everstep.pipeline.frontend.check import compare_gradients, find_mixing_nodes  # noqa: E402
from everstep.pipeline.frontend.split import node_modules  # noqa: E402
from tests.pipeline import front  # noqa: E402
from tests.pipeline.models import CASES  # noqa: E402

pytestmark = pytest.mark.torch


def test_stages_that_are_the_model_pass_and_leave_no_trace() -> None:
    case = CASES["resnet"]
    # Of its own: the one that other tests share may have gradients of theirs.
    model, batch = case.build(), case.example()
    stages = split_model(trace_model(model, batch.inputs), {"layer2": 1, "layer4": 2})
    before = {name: each.clone() for name, each in model.state_dict().items()}
    model.zero_grad()
    assert compare_gradients(model, stages, batch.inputs, lambda output: case.loss(output, batch.targets)[0]) == 0.0
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_something_handed_on_beside_the_values_is_found() -> None:
    class Leaky(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.two(self.one(x))

    model, inputs = Leaky(), {"x": torch.randn(2, 3)}
    stages = split_model(trace_model(model, inputs), {"two": 1})
    # After it was traced, so no edge knows of it.
    model.register_forward_hook(lambda module, args, output: output * module.one.bias.sum())
    with pytest.raises(PipelineError, match=r"the gradient of (one|two)\.\w+ differs"):
        compare_gradients(model, stages, inputs, lambda output: output.sum())


@pytest.mark.parametrize("name", ["gpt", "resnet", "custom"])
def test_samples_of_ordinary_models_do_not_meet(name: str) -> None:
    found, batch = front.traced(CASES[name]), CASES[name].example()
    assert find_mixing_nodes(node_modules(found), batch.inputs, found.model) == []


def test_where_samples_meet_is_named() -> None:
    class Contrast(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            x = self.one(x)
            return (x - x.mean(0)).softmax(0)

    model, inputs = Contrast(), {"x": torch.randn(4, 3)}
    assert find_mixing_nodes(node_modules(trace_model(model, inputs)), inputs, model) == [":mean", ":softmax"]


def test_the_balance_of_experts_is_taken_over_a_batch() -> None:
    found, batch = front.traced(CASES["experts"]), CASES["experts"].example()
    assert find_mixing_nodes(node_modules(found), batch.inputs, found.model) == ["experts.0", "experts.1", "experts.2"]
