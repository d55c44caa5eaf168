"""Tracing records nodes, leaves modules whole, or rejects a model with the reason."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend import split_model, stage, trace_model  # noqa: E402
from everstep.pipeline.frontend.arguments import Arguments  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from everstep.pipeline.frontend.record import Untraceable  # noqa: E402
from everstep.pipeline.frontend.recorder import Recorder  # noqa: E402
from everstep.pipeline.frontend.split import node_modules  # noqa: E402
from everstep.pipeline.profile_counted import count_costs  # noqa: E402
from tests.pipeline import front  # noqa: E402
from tests.pipeline.models import CASES  # noqa: E402
from tests.pipeline.small_nets import Block, Net, X  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["t5", "llama", "resnet"])
def test_batches_of_other_sizes_take_the_same_way(name: str) -> None:
    case = CASES[name]
    found = front.traced(case)
    stages = split_model(found, dict.fromkeys([node.name for node in found.graph.nodes][-3:], 1))
    for samples in (2, 6):
        batch = case.example(samples)
        inputs = {key: value[:, :7] if value.dtype == torch.long else value for key, value in batch.inputs.items()}
        assert torch.equal(run_stages(stages, inputs), found.model(**inputs))


@pytest.mark.parametrize("name", ["gpt", "experts"])
def test_a_model_without_weights_has_the_same_graph(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        model = case.factory().double()
    meta = trace_model(model, case.example().inputs)
    assert meta.graph == front.traced(case).graph
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_padding_leaves_the_number_of_samples_open() -> None:
    """As the losses of transformers pad their labels, inside the model."""
    net = Net(Block(lambda x: F.pad(x, (0, 1), value=-1.0)[:, 1:]))
    stages = split_model(trace_model(net, X), {"two": 1})
    for samples in (2, 5):
        x = torch.randn(samples, 4)
        assert torch.equal(run_stages(stages, {"x": x}), net(x))


def test_custom_functions_are_nodes_that_are_not_looked_into() -> None:
    found = front.traced(CASES["custom"])
    names = [node.name for node in found.graph.nodes]
    assert [name for name in names if "Bend" in name] == [":Bend", ":Bend.1", ":Bend.2", ":Bend.3"]


def test_a_context_around_construction_places_modules() -> None:
    with stage(1):
        two = nn.Linear(4, 4)
    model = Net(nn.Tanh())
    model.two = two
    found = trace_model(model, X)
    assert found.manual == {"two": 1}
    assert [each.calls for each in split_model(found)] == [("one", "between"), ("two",)]


def test_a_context_in_forward_places_calls() -> None:
    class Placed(Net):
        def forward(self, x: Any) -> Any:
            x = self.one(x)
            with stage(1):
                x = self.between(x) * 2
                with stage(2):
                    return self.two(x)

    found = trace_model(Placed(nn.Tanh()), X)
    assert found.manual == {"between": 1, ":mul": 1, "two": 2}
    assert [each.index for each in split_model(found)] == [0, 1, 2]


def test_what_is_not_placed_follows_the_values_it_uses() -> None:
    found = front.traced(CASES["gpt"])
    stages = split_model(found, {"h.1": 1, "h.3": 2})
    assert [name for name in stages[1].calls if name.startswith("h.")] == ["h.1", "h.2"]
    assert stages[2].calls == ("h.3", "ln_f", "lm_head") or set(stages[2].calls) >= {"h.3", "ln_f", "lm_head"}


@pytest.mark.parametrize(
    ("stage_of", "reason"),
    [
        ({"one": 1, "two": 0}, "'two' cannot be in stage 0: it uses values of stage 1"),
        ({"one": 0, "two": 2}, r"stages \[1\] would be empty"),
        ({"three": 1}, "no node is called 'three': the nodes are one, between"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(stage_of: dict[str, int], reason: str) -> None:
    with pytest.raises(PipelineError, match=reason):
        split_model(trace_model(Net(nn.Tanh()), X), stage_of)


def test_a_loop_over_samples_is_opaque() -> None:
    def loop(x: Any) -> Any:
        return torch.stack([row * index for index, row in enumerate(x)])

    model = Net(Block(loop))
    found = trace_model(model, X)
    assert "number of samples" in found.leaves["between"]
    inputs = {"x": torch.ones(5, 4)}
    assert torch.equal(run_stages(split_model(found, {"two": 1}), inputs), model(**inputs))


def test_a_loop_over_samples_in_the_model_itself_is_refused() -> None:
    with pytest.raises(Untraceable, match="fixes the number of samples"):
        trace_model(Block(lambda x: torch.stack([row * index for index, row in enumerate(x)])), X["x"])


def test_a_choice_by_data_is_opaque_in_a_module_and_refused_in_the_model() -> None:
    def choose(x: Any) -> Any:
        return x if x.sum() > 0 else -x

    assert "without data" in trace_model(Net(Block(choose)), X).leaves["between"]
    with pytest.raises(Untraceable, match=r"without data.*put what depends on data into a module of its own"):
        trace_model(Block(choose), X["x"])


def test_lengths_that_are_never_zero_may_be_given_to_a_module_that_depends_on_them() -> None:
    class Packed(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Any, lengths: Any) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.inner(packed)[1][0][-1]

    class Texts(Net):
        def forward(self, x: Any, lengths: Any = None) -> Any:
            return self.two(self.between(self.one(x), lengths))

    model, inputs = Texts(Packed()), {"x": torch.randn(3, 5, 4), "lengths": torch.tensor([5, 2, 3])}
    found = trace_model(model, inputs)
    assert "without data" in found.leaves["between"]
    costs = count_costs(found.graph, node_modules(found), inputs)
    assert all(node.forward for node in costs.graph.nodes if node.name == "between")
    stages = split_model(found, {"one": 0, "between": 1, "two": 2})
    assert torch.equal(run_stages(stages, inputs), model(**inputs))


def test_what_a_module_that_depends_on_data_has_passed_on_as_it_was_may_be_used_by_others() -> None:
    def choose(x: Any) -> Any:
        x = x.contiguous().to(x.dtype)  # gives the tensor itself
        return x if x.sum() > 0 else -x

    class Residual(Net):
        def forward(self, x: Any) -> Any:
            x = self.one(x)
            return self.two(x + self.between(self.between(x)) - x.tanh())

    model = Residual(Block(choose))
    found = trace_model(model, X)
    assert "without data" in found.leaves["between"]
    for last in ("two", ":add"):
        assert torch.equal(run_stages(split_model(found, {last: 1}), X), model(**X))


def test_a_number_from_data_does_not_leave_a_module() -> None:
    class Scaled(Net):
        def forward(self, x: Any) -> Any:
            return self.two(self.one(x)) * self.between(x)

    with pytest.raises(Untraceable, match="numbers that depend on the data"):
        trace_model(Scaled(Block(lambda x: float(x.mean()))), X)


def test_a_gradient_in_forward_stays_in_its_module() -> None:
    def slope(x: Any) -> Any:
        (found,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return found

    model = Net(Block(slope))
    found = trace_model(model, X)
    assert "gradient of a gradient" in found.leaves["between"]
    inputs = {"x": torch.randn(3, 4)}
    assert torch.equal(run_stages(split_model(found, {"between": 1, "two": 2}), inputs, detached=True), model(**inputs))


def test_a_gradient_across_modules_is_refused() -> None:
    class Slope(Net):
        def forward(self, x: Any) -> Any:
            x = x.requires_grad_()
            (found,) = torch.autograd.grad(self.two(self.one(x)).sum(), x, create_graph=True)
            return found

    with pytest.raises(Untraceable, match="a gradient of a gradient does not pass from stage to stage"):
        trace_model(Slope(nn.Tanh()), X)


def test_hooks_of_the_model_itself_are_refused() -> None:
    model = Net(nn.Tanh())
    model.register_forward_hook(lambda *args: None)
    with pytest.raises(Untraceable, match="it has hooks"):
        trace_model(model, X)


def test_another_way_for_other_sizes_is_refused_when_it_comes() -> None:
    class Cut(Net):
        def forward(self, x: Any) -> Any:
            x = self.one(x)
            return self.two(x[:, 1:] if x.shape[1] > 4 else x)

    stages = split_model(trace_model(Cut(nn.Tanh()), {"x": torch.ones(3, 5, 4)}), {"two": 1})
    assert run_stages(stages, {"x": torch.ones(2, 6, 4)}).shape == (2, 5, 4)
    with pytest.raises(PipelineError, match="another path through the model's code"):
        run_stages(stages, {"x": torch.ones(2, 4, 4)})


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_in_the_model_do_not_hide_modules(reentrant: bool) -> None:
    class Saving(Net):
        def forward(self, x: Any) -> Any:
            return self.two(checkpoint(self.between, self.one(x), use_reentrant=reentrant))

    model = Saving(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    found = trace_model(model, X)
    assert [node.name for node in found.graph.nodes] == ["one", "between.0", "between.1", "two", "output"]
    inputs = {"x": torch.randn(2, 4)}
    assert torch.equal(run_stages(split_model(found, {"between.1": 1}), inputs), model(**inputs))


def test_what_the_models_own_code_draws_is_a_module_of_its_own() -> None:
    class Noisy(Net):
        def forward(self, x: Any) -> Any:
            return self.two(F.dropout(self.one(x), 0.5, self.training))

    model = Noisy(nn.Tanh())
    found = trace_model(model, X)
    for placed in ({}, {"two": 1}, {":dropout": 1, "two": 2}):
        (name,) = [
            name for each in split_model(found, placed) for name, _ in each.module.named_modules() if "drawing" in name
        ]
        assert name == "dropout_drawing"


def test_a_module_whose_own_code_draws_is_not_cut() -> None:
    found = front.traced(CASES["gpt-dropout"])
    assert set(found.leaves) == {f"h.{index}.attention" for index in range(4)}


def test_precision_and_gradients_that_the_model_turns_off_stay_off() -> None:
    class Careful(Net):
        def forward(self, x: Any) -> Any:
            x = self.one(x)
            with torch.autocast("cpu", enabled=False):
                x = x.float() @ self.two.weight
            with torch.no_grad():
                size = x.norm()
            return self.two(x / size)

    model = Careful(nn.Tanh())
    stages = split_model(trace_model(model, X), {"two": 1})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, expected = run_stages(stages, X), model(**X)
    assert torch.equal(output, expected)
    for one, other in zip(
        torch.autograd.grad(output.sum(), list(model.parameters()), allow_unused=True),
        torch.autograd.grad(expected.sum(), list(model.parameters()), allow_unused=True),
        strict=True,
    ):
        assert one is other is None or torch.equal(one, other)


def test_tables_that_no_module_knows_are_constants() -> None:
    class Table(Net):
        def forward(self, x: Any) -> Any:
            return self.two(self.one(x) + TABLE[: x.shape[1]])

    model = Table(nn.Tanh())
    found = trace_model(model, X)
    assert torch.equal(run_stages(split_model(found, {"two": 1}), X), model(**X))


TABLE = torch.arange(9.0)


def test_arguments_that_are_left_out_and_rests_are_handed_on() -> None:
    class Open(Net):
        def forward(self, x: Any, bias: Any = None, **rest: Any) -> Any:
            x = self.one(x) + rest["shift"]
            return self.two(x if bias is None else x + bias)

    model = Open(nn.Tanh())
    inputs = {**X, "shift": torch.full((3, 4), 2.0)}
    first, second = split_model(trace_model(model, inputs), {"two": 1})
    assert first.inputs == ("input:shift", "input:x")
    assert torch.equal(run_stages([first, second], inputs), model(**inputs))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"x": X["x"], "alpha": 0.5}, r"'alpha' is 0.5 now, and was 2.0 in the example"),
        ({"x": X["x"], "alpha": torch.tensor(2.0)}, "'alpha' is a tensor now, and was none"),
        ({"x": X["x"]}, "'alpha' is 1.0 now, and was 2.0"),
        ({"x": X["x"], "alpha": 2.0, "mask": X["x"]}, "'mask' was not in the example"),
        ({"x": 3.0, "alpha": 2.0}, "'x' was a tensor"),
        ({"x": [X["x"]], "alpha": 2.0}, "'x' is built otherwise"),
        ({"x": torch.ones(2, 9), "alpha": 2.0}, None),
        ({"x": None, "alpha": 2.0}, None),
    ],
)
def test_what_is_no_tensor_is_part_of_the_trace(given: dict[str, Any], reason: str | None) -> None:
    """A number would stay what it was in the example, and nothing would say so."""

    class Model(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, alpha: float = 1.0, mask: Any = None) -> Any:
            return x * alpha if mask is None else x * mask

    arguments = Arguments(Model())
    arguments.traced_with({"x": X["x"], "alpha": 2.0})
    if reason is None:
        arguments.check(given)
    else:
        with pytest.raises(PipelineError, match=reason):
            arguments.check(given)


def test_samples_come_first_in_every_tensor() -> None:
    with pytest.raises(Untraceable, match=r"first dimension, but those are of sizes \[2, 3\]"):
        trace_model(Block(lambda x, y: x), (torch.ones(3, 4), torch.ones(2, 4)))


def test_an_example_that_does_not_fit_is_refused() -> None:
    with pytest.raises(Untraceable, match="does not fit the arguments of forward"):
        trace_model(Net(nn.Tanh()), {"y": torch.ones(3, 4)})


def test_a_trace_imports_nothing_of_torch_export() -> None:
    code = (
        "import sys, torch; from everstep.pipeline.frontend import trace_model; "
        "trace_model(torch.nn.Linear(4, 4), {'input': torch.ones(3, 4)}); "
        "sys.exit(', '.join({'torch.export._trace', 'networkx'} & {*sys.modules}) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Collecting(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Collects what its layers give by hooks, which its first call registers, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(torch.tanh) for _ in range(2)), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        if not getattr(self, "is_listening", False):
            self.is_listening, self.collected = True, list[Any]()
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, result: self.collected.append(result))
        self.collected.clear()
        for layer in self.layers:
            x = layer(x)
        return self.head(x), tuple(self.collected)


def test_hooks_that_a_first_call_registers_are_there_once() -> None:
    class Model(Net):
        def forward(self, x: Any) -> Any:
            y, collected = self.between(self.one(x))
            return self.two(y) + sum(collected)

    model = Model(Collecting())
    stages = split_model(trace_model(model, X), {"two": 1})
    assert [len(layer._forward_hooks) for layer in model.between.layers] == [0, 0]
    for samples in (2, 5):
        x = torch.randn(samples, 4)
        assert torch.equal(run_stages(stages, {"x": x}), model(x))


class Looping(nn.Module):  # type: ignore[misc]
    """Fixes the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return torch.stack([self.layer(x[place]) for place in range(len(x))])


def test_modules_of_one_class_that_fix_the_samples_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def record(*args: Any) -> Any:
        made.append(Recorder(*args))
        return made[-1]

    monkeypatch.setattr("everstep.pipeline.frontend.trace.Recorder", record)
    counts = []
    for layers in (2, 8):
        made.clear()
        model = nn.Sequential(*(Looping() for _ in range(layers)), nn.Linear(4, 4))
        stages = split_model(trace_model(model, X["x"]), {str(layers): 1})
        assert torch.allclose(run_stages(stages, {"input": X["x"]}), model(X["x"]))
        counts.append(len(made))
    assert counts[0] == counts[1]


class WithArrays(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Makes arrays of numpy in each forward, others in evaluation if `is_other`, and gives them to torch."""

    def __init__(self, *, is_other: bool) -> None:
        super().__init__()
        self.first, self.last, self.is_other = nn.Linear(4, 3), nn.Linear(3, 4), is_other

    def forward(self, x: Any) -> Any:
        weights = np.linspace(0.5, 1.5 if self.training or not self.is_other else 2.5, 3)
        x = self.first(x)[:, np.arange(3)[::-1].copy()]
        return self.last(x * torch.tensor(weights, dtype=x.dtype) + torch.tensor(weights[None], dtype=x.dtype))


@pytest.mark.parametrize("is_other", [False, True])
def test_arrays_that_code_makes_and_gives_to_torch_are_part_of_the_trace(is_other: bool) -> None:
    model = WithArrays(is_other=is_other)
    found = trace_model(model, X)
    stages = split_model(found, {node.name: int(node.name > "first") for node in found.graph.nodes})
    for mode in (True, False):
        for each in (model, *(part.module for part in stages)):
            each.train(mode)
        torch.testing.assert_close(run_stages(stages, X), model(**X))
