"""Stages, one after the other, are the model: bit for bit, in training and evaluation, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from everstep.pipeline.frontend import StageModule, Traced, split_model, trace_model  # noqa: E402
from tests.pipeline import front  # noqa: E402
from tests.pipeline.models import CASES, Batch, Case, gradients  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def traced() -> Callable[[str], tuple[Case, Any, Traced]]:
    def get(name: str) -> tuple[Case, Any, Traced]:
        found = front.traced(CASES[name])
        return CASES[name], found.model, found

    return get


def chained(stages: Sequence[StageModule], batch: Batch) -> Any:
    """The output, by all stages in one process; each gets what it asks for, and no more."""
    values = {f"input:{name}": value for name, value in batch.inputs.items()}
    for stage in stages:
        values |= stage({name: values[name] for name in stage.inputs})
    return values["output"]


def result(model: Any, run: Callable[[], Any], case: Case, batch: Batch) -> tuple[Any, dict[str, Any]]:
    """(output, gradients by name), with the same random numbers whoever runs; statistics of the model stay."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(7)
    model.zero_grad()
    output = run()
    total, _ = case.loss(output, batch.targets)
    total.backward()
    found = {f"after {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return output, gradients(model) | found


def same(one: Any, other: Any) -> bool:
    (left, spec), (right, other_spec) = (torch.utils._pytree.tree_flatten(each) for each in (one, other))
    return spec == other_spec and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(left, right, strict=True)
    )


def assert_same(case: Case, model: Any, stages: Sequence[StageModule], batch: Batch, *, exact: bool = True) -> None:
    expected, wanted = result(model, lambda: model(**batch.inputs), case, batch)
    output, found = result(model, lambda: chained(stages, batch), case, batch)
    assert same(output, expected)
    assert found.keys() == wanted.keys()
    for name in wanted:
        if exact:
            assert torch.equal(found[name], wanted[name]), name
        else:  # another order of sums, where a value has three users or more
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-12)


def even(traced: Traced, stages: int) -> dict[str, int]:
    """Nodes in their order, as many to each stage, but what must be together is."""
    names = [node.name for node in traced.graph.nodes]
    stage_of = {name: index * stages // len(names) for index, name in enumerate(names)}
    return settle(traced, stage_of)


def settle(traced: Traced, stage_of: dict[str, int]) -> dict[str, int]:
    """The nearest placement that can be: values flow upwards, groups are one, stages have no gaps."""
    changed = True
    while changed:
        changed = False
        for node in traced.graph.nodes:
            group = [each.name for each in traced.graph.nodes if each.colocate == node.colocate and node.colocate]
            least = max(stage_of[name] for name in (node.name, *node.inputs, *group))
            for name in (node.name, *group):
                changed |= stage_of[name] != least
                stage_of[name] = least
    stage_of["output"] = max(stage_of.values())
    order = sorted(set(stage_of.values()))
    return {name: order.index(stage) for name, stage in stage_of.items()}


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_even_stages_is_the_model(name: str, traced: Any) -> None:
    case, model, found = traced(name)
    for stages in (1, 2, 4):
        assert_same(case, model, split_model(found, even(found, stages)), case.example(5, seed=stages))


@pytest.mark.parametrize("name", CASES)
def test_evaluation_is_the_models(name: str, traced: Any) -> None:
    case, model, found = traced(name)
    stages = split_model(found, even(found, 3))
    batch = case.example(3)
    model.eval()
    try:
        for stage in stages:
            stage.module.eval()
        with torch.no_grad():
            assert same(chained(stages, batch), model(**batch.inputs))
    finally:
        model.train()
        for stage in stages:
            stage.module.train()


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6)
@given(data=st.data())
def test_random_cuts_are_the_model(name: str, traced: Any, data: st.DataObject) -> None:
    case, model, found = traced(name)
    stages = data.draw(st.integers(2, 5))
    wanted = {node.name: data.draw(st.integers(0, stages - 1)) for node in found.graph.nodes}
    # Nodes in another order draw in another order: which numbers a module draws is not for the stages to say.
    if name != "gpt-dropout":
        assert_same(case, model, split_model(found, settle(found, wanted)), case.example(2), exact=False)


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_keeps_its_name_and_has_a_stage(name: str, traced: Any) -> None:
    _, model, found = traced(name)
    stages = split_model(found, even(found, 3))
    names = dict(model.named_parameters())
    owned: dict[str, list[int]] = {}
    for stage in stages:
        for each, parameter in stage.module.named_parameters():
            assert parameter is names[each]
            owned.setdefault(each, []).append(stage.index)
    assert owned.keys() == names.keys()
    tied = {each for each, owners in owned.items() if len(owners) > 1}
    assert tied <= {each for each, _ in found.graph.shared}


def test_a_stage_runs_the_original_modules_where_the_cut_allows(traced: Any) -> None:
    _, _, found = traced("gpt")
    first, second = split_model(found, {"h.2": 1})
    assert {"wte", "h.0", "h.1"} <= set(first.calls)
    assert {"h.2", "h.3", "ln_f", "lm_head"} <= set(second.calls)
    assert not [name for name in (*first.calls, *second.calls) if name.startswith("h.") and ":" in name]


def test_a_module_with_hooks_is_never_cut_and_its_hooks_run(traced: Any) -> None:
    case = CASES["gpt"]
    model = case.build()
    seen: list[Any] = []
    model.h[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    found = trace_model(model, case.example().inputs)
    assert found.leaves["h.1"] == "it has hooks"
    seen.clear()
    chained(split_model(found, even(found, 4)), case.example(3))
    assert len(seen) == 1


def test_what_depends_on_data_is_one_node_with_the_reason(traced: Any) -> None:
    _, _, found = traced("experts")
    assert set(found.leaves) == {"experts.0", "experts.1", "experts.2"}
    assert all("without data" in reason for reason in found.leaves.values())


def test_memory_that_changes_is_in_one_stage(traced: Any) -> None:
    _, _, found = traced("resnet")
    groups = {node.name: node.colocate for node in found.graph.nodes}
    assert groups["layer1.0.bn2"] == groups["layer1.0:add_"] == groups["layer1.0.relu@1"] != ""
    assert groups["layer1.0.relu@1"] != groups["layer1.1.conv2"]


def test_masks_and_positions_are_made_where_they_are_used(traced: Any) -> None:
    _, _, found = traced("gpt")
    names = {node.name for node in found.graph.nodes}
    assert not [name for name in names if "arange" in name or "triu" in name or "full" in name]
    _, second = split_model(found, {"h.2": 1})
    assert [name for name in second.inputs if name != "input:input_ids"] == ["h.1:add.1"]


def test_only_the_inputs_that_a_stage_uses_are_asked_for(traced: Any) -> None:
    _, _, found = traced("pair")
    first, second = split_model(found, {"right": 1})
    assert first.inputs == ("input:pair",)
    assert second.inputs == ("input:pair", ":tanh", ":mul")  # of the left, which the first stage has scaled


def test_a_stage_of_positions_alone_reads_the_argument_that_is_as_long(traced: Any) -> None:
    case, model, found = traced("gpt")
    names = [node.name for node in found.graph.nodes]
    stages = split_model(found, {name: 0 if name == "wpe" else 1 for name in names})
    assert stages[0].inputs == ("input:input_ids",)
    assert stages[0].calls[-1] == "wpe"
    assert_same(case, model, stages, case.example(3))


def test_a_stage_that_is_not_given_a_value_says_which(traced: Any) -> None:
    from everstep.pipeline.errors import PipelineError

    _, _, found = traced("mlp")
    with pytest.raises(PipelineError, match="stage 1 did not receive"):
        split_model(found, even(found, 2))[1]({})


def test_names_in_a_stage_are_those_of_the_model(traced: Any) -> None:
    _, model, found = traced("resnet")
    whole = dict(model.named_modules())
    for stage in split_model(found, even(found, 3)):
        for name, module in stage.module.named_modules():
            assert not name or type(module).__name__ == "Skeleton" or module is whole[name]


def test_a_frozen_module_stays_as_it_is() -> None:
    case = CASES["resnet"]
    model: Any = case.build()
    model.bn1.eval()
    found = trace_model(model, case.example().inputs)
    assert not model.bn1.training
    assert model.training
    assert_same(case, model, split_model(found, even(found, 3)), case.example())


def test_the_model_in_evaluation_mode_is_traced_for_training_too() -> None:
    case = CASES["gpt-dropout"]
    model = case.build().eval()
    stages = split_model(trace_model(model, case.example().inputs), {"h.1": 1})
    model.train()
    for stage in stages:
        stage.module.train()
    assert_same(case, model, stages, case.example())


class Ragged(nn.Module):  # type: ignore[misc]
    """Something else in evaluation, in the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 5), nn.Linear(5, 5)

    def forward(self, x: Any) -> Any:
        x = self.one(x)
        return self.two(x) if self.training else self.two(x).softmax(-1)


def test_a_model_that_changes_its_way_in_evaluation_refuses_to_evaluate() -> None:
    from everstep.pipeline.errors import PipelineError

    model = Ragged()
    batch = CASES["mlp"].example(dtype=torch.float32)
    stages = split_model(trace_model(model, batch.inputs), {"two": 1})
    assert same(chained(stages, batch), model(**batch.inputs))
    for stage in stages:
        stage.module.eval()
    with pytest.raises(PipelineError, match="evaluation"):
        chained(stages, batch)


class Biased(nn.Module):  # type: ignore[misc]
    """Makes a table by the size of its input alone, or adds the one that it is given, and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any, table: Any = None) -> tuple[Any, Any]:
        x = self.one(x)
        if table is None:
            table = torch.zeros(1, x.shape[1], 4)
        return self.two(x + table), table


class Handed(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Biased() for _ in range(3)])

    def forward(self, x: Any) -> Any:
        table = None
        for block in self.blocks:
            x, table = block(x, table)
        return x


def test_a_table_that_blocks_hand_on_is_made_by_each_stage_before_it_is_used() -> None:
    """As the biases of positions in encoder-decoder models: a block that returns one needs it first."""
    model, x = Handed(), torch.randn(2, 3, 4)
    found = trace_model(model, {"x": x})
    names = [node.name for node in found.graph.nodes]
    for place in range(1, len(names)):
        stages = split_model(found, {name: int(number >= place) for number, name in enumerate(names)})
        assert torch.equal(chained(stages, Batch({"x": x}, None)), model(x)), names[place]
