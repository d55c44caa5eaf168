"""Before anything is trained: are the stages the model, and are samples alone in their batch?"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.comparison import compare_stages  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend import split_model, trace_model  # noqa: E402
from everstep.pipeline.frontend.check import compare_gradients, find_mixing_nodes  # noqa: E402
from everstep.pipeline.frontend.split import node_modules  # noqa: E402
from everstep.pipeline.frontend.tree import build_tree  # noqa: E402
from everstep.pipeline.meeting_samples import check_samples  # noqa: E402
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


def test_a_gradient_that_is_no_number_in_the_model_itself_is_no_difference() -> None:
    class Empty(nn.Module):  # type: ignore[misc]
        """As attention with a row in which everything is masked."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            hidden = self.one(x)
            return self.two((hidden + torch.where(x > 9, -torch.inf, 0.0)).softmax(1))

    model, inputs = Empty(), {"x": torch.tensor([[1.0, 2.0, 3.0], [10.0, 10.0, 10.0]])}
    stages = split_model(trace_model(model, inputs), {"two": 1})
    assert compare_gradients(model, stages, inputs, lambda output: output.sum()) == 0.0
    model.register_forward_hook(lambda module, args, output: output * module.two.bias.sum())
    with pytest.raises(PipelineError, match=r"the gradient of two\.bias differs"):
        compare_gradients(model, stages, inputs, lambda output: output[0].sum())


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


class Clamped(torch.autograd.Function):  # type: ignore[misc, name-defined]
    @staticmethod
    def forward(ctx: Any, x: Any, limit: float) -> Any:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.clamp(-ctx.limit, ctx.limit), None


class Reversed(torch.autograd.Function):  # type: ignore[misc, name-defined]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -0.1 * gradient


class Backwards(nn.Module):  # type: ignore[misc]
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how

    def forward(self, x: Any) -> Any:
        x = self.one(x)
        if self.how == "clamps little":
            x = Clamped.apply(x, 1e-3)
        elif self.how == "clamps what is large":
            x = Clamped.apply(x, 50.0)
        elif self.how == "reverses":
            x = Reversed.apply(x)
        elif x.requires_grad:
            x.register_hook(torch.nn.functional.normalize if self.how == "normalises" else torch.neg)
        return self.two(x)


@pytest.mark.parametrize("how", ["clamps little", "clamps what is large", "reverses", "normalises", "negates"])
def test_a_backward_that_depends_on_the_size_of_gradients_is_refused(how: str) -> None:
    """It begins with the sum of losses in a pipeline, and with their mean in one process."""
    model = Backwards(how).double()
    batch = {"x": torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(4, 3)}
    found = trace_model(model, batch)
    parts = split_model(found, {"two": 1})
    if how in ("reverses", "negates"):
        compare_stages(model, found, parts, batch)
        return
    with pytest.raises(
        PipelineError, match=r"of one.weight of a loss that is 1024 times as large .*EngineOptions.clip"
    ):
        compare_stages(model, found, parts, batch)


def test_what_a_model_does_between_its_blocks_is_missed_though_their_arguments_have_other_names() -> None:
    class Shifted(nn.Module):  # type: ignore[misc]
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.one, self.two, self.shift = nn.Linear(3, 3), nn.Linear(3, 3), shift

        def forward(self, x: Any) -> Any:
            return self.two(self.one(x).tanh() + self.shift) if self.shift else self.two(self.one(x))

    batch = {"input": torch.ones(2, 3)}  # as nn.Linear calls it
    for shift in (0.0, 0.5):
        model = Shifted(shift)
        chain = build_tree(model, ["one", "two"])
        if not shift:
            compare_stages(model, chain, chain.split({"two": 1}), batch)
            continue
        with pytest.raises(PipelineError, match=r"cut between its blocks \(one, two.*what else its forward does"):
            compare_stages(model, chain, chain.split({"two": 1}), batch)


class Forces(nn.Module):  # type: ignore[misc]
    """Returns a slope of what it learns; of that, a graph in training only."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two, self.how = nn.Linear(3, 3), nn.Linear(3, 1), how

    def forward(self, x: Any) -> Any:
        with torch.set_grad_enabled(self.training or self.how == "frees its graph"):
            x = x.detach().requires_grad_(True)
            energy = self.two(self.one(x).tanh())
            if self.how == "makes no graph":
                return energy.expand_as(x)
            return energy + torch.autograd.grad(energy.sum(), x, create_graph=self.training)[0]


@pytest.mark.parametrize("how", ["frees its graph", "makes no graph"])
def test_a_model_that_learns_in_training_only_is_compared_in_training(how: str) -> None:
    """As potentials do that learn from forces: torch.autograd.grad(…, create_graph=self.training)."""
    torch.manual_seed(0)
    model = nn.Sequential(Forces(how), nn.Dropout(0.5), nn.Linear(3, 3)).double()
    model[2].requires_grad_(how == "frees its graph")
    batch = {"input": torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(4, 3)}
    found = trace_model(model, batch)
    flags = [each.training for each in model.modules()]
    parts = split_model(found, front.even(found, 2))
    compare_stages(model, found, parts, batch)
    assert flags == [each.training for each in model.modules()]


class AddsInPlace(nn.Module):  # type: ignore[misc]
    """Changes in place what dropout gives, which in evaluation is what the activation keeps for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.drop = nn.Linear(3, 3), nn.Linear(3, 3), nn.Dropout(0.5)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        y = self.drop(self.one(x).sigmoid())
        y += x
        return self.two(y)


def test_what_dropout_gives_may_be_changed_in_place() -> None:
    model = AddsInPlace().double()
    batch = {"x": torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(4, 3)}
    found = trace_model(model, batch)
    compare_stages(model, found, split_model(found, {"two": 1}), batch)
    idle = check_samples(model, found, batch, batch["x"], nn.functional.mse_loss, None, frozenset())
    assert idle == ["spare"]  # of which the loss has no gradient, which is known where gradients were
