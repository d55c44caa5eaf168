"""Models that cannot be traced are cut between the blocks of a chain."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend import build_tree, split_model, stage  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from tests.pipeline.models import CASES  # noqa: E402

pytestmark = pytest.mark.torch


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)), nn.Tanh())


def test_a_sequence_is_cut_between_any_two_of_its_modules() -> None:
    model = chain()
    found = build_tree(model, reason="its loops depend on data")
    assert found.blocks == ("0", "1.0", "1.1", "2")
    assert found.reason == "its loops depend on data"
    stages = split_model(found, {"1.1": 1, "2": 2})
    assert [each.inputs for each in stages] == [("input:input",), ("1.0",), ("1.1",)]
    x = torch.randn(2, 3)
    assert torch.equal(run_stages(stages, {"input": x}), model(x))


def test_parameters_keep_their_names() -> None:
    model = chain()
    names = [name for each in split_model(build_tree(model), {"1.1": 1}) for name, _ in each.module.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_a_tied_parameter_belongs_to_all_its_stages_by_one_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    found = build_tree(model)
    assert found.graph.shared == (("0.weight", 36),)
    stages = split_model(found, {"2": 1})
    assert {name for name, _ in stages[1].module.named_parameters()} == {"0.weight", "2.bias"}


class Chain(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        with stage(1):
            self.rest = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Any) -> Any:
        for each in (self.first, *self.rest):
            x = each(x)
        return x


def test_a_list_of_blocks_is_a_chain() -> None:
    model = Chain()
    stages = split_model(build_tree(model, [model.first, *model.rest]))
    assert [each.calls for each in stages] == [("first",), ("rest.0", "rest.1")]
    x = torch.randn(2, 3)
    assert torch.equal(run_stages(stages, {"input": x}), model(x))


def test_a_model_that_is_no_chain_is_refused_with_what_there_is() -> None:
    with pytest.raises(PipelineError, match=r"name the blocks .* lists in rest"):
        build_tree(Chain())


def test_parameters_outside_of_all_blocks_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"would not be trained: first\.weight"):
        build_tree(Chain(), ["rest.0", "rest.1"])


def test_a_model_of_one_sequence_is_its_own_chain() -> None:
    case = CASES["mlp"]
    model = case.build()
    with pytest.raises(PipelineError, match="Mlp"):
        build_tree(model)  # it has a forward of its own, which might do anything
