"""Modules that depend on data run as they are: what leaves them is what code around was traced with, or an error."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend import split_model, trace_model  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from everstep.pipeline.frontend.record import Untraceable  # noqa: E402
from tests.pipeline.small_nets import Block, Net, X  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x: bool(x.max() > 9), r"returned True, and False"),
        (lambda x: 1 + int(x.max() > 9), r"returned 2, and 1"),
        (lambda x: x if x.max() > 9 else None, r"returned a tensor, and None"),
        (lambda x: None if x.max() > 9 else x, r"returned None, and a tensor"),
        (lambda x: [x] * (1 + int(x.max() > 9)), r"returned 3 values, and 2"),
        (lambda x: {"b" if x.max() > 9 else "a": x}, r"returned \(…, {'b': …}\), and \(…, {'a': …}\)"),
        (
            lambda x: {"b": x, "a": x} if x.max() > 9 else {"a": x, "b": x},
            r"returned \(…, {'b': …, 'a': …}\), and \(…, {'a': …, 'b': …}\)",
        ),
    ],
)
def test_what_is_no_tensor_and_depends_on_data_is_refused_when_it_leaves_a_module(returned: Any, said: str) -> None:
    class Branch(Net):
        def forward(self, x: Any) -> Any:
            x, found = self.between(self.one(x))
            return self.two(x * (1 + found) if isinstance(found, int) else x)

    model = Branch(Block(lambda x: (x, returned(x))))
    with torch.no_grad():
        model.one.weight.fill_(1.0)
    stages = split_model(trace_model(model, X), {"two": 1})
    assert torch.equal(run_stages(stages, X), model(**X))
    with pytest.raises(PipelineError, match=rf"module 'between' {said} when pipeline\(\) was called"):
        run_stages(stages, {"x": 100 * X["x"]})


def test_a_module_that_returns_no_tensor_for_some_data_is_refused_when_it_does() -> None:
    model = Net(Block(lambda x: None if x.max() > 9 else x))
    with torch.no_grad():
        model.one.weight.fill_(1.0)
    stages = split_model(trace_model(model, X), {"two": 1})
    assert torch.equal(run_stages(stages, X), model(**X))
    with pytest.raises(
        PipelineError, match=r"module 'between' returned None, and a tensor when pipeline\(\) was called"
    ):
        run_stages(stages, {"x": 100 * X["x"]})


@pytest.mark.parametrize("box", [[], {}])
def test_a_module_that_depends_on_data_does_not_hand_values_on_in_a_list_that_it_is_given(box: Any) -> None:
    def keep(x: Any, found: Any) -> Any:
        x = x if x.sum() > 0 else -x
        if isinstance(found, dict):
            found["aux"] = x.square()
        else:
            found.append(x.square())
        return x

    class Balanced(Net):
        def forward(self, x: Any) -> Any:
            found = type(box)()
            x = self.between(self.one(x), found)
            return self.two(x), sum(found.values() if isinstance(found, dict) else found)

    with pytest.raises(Untraceable, match=r"between .*it changes a list or a dictionary that it is given"):
        trace_model(Balanced(Block(keep)), X)


def _append(x: Any, found: Any) -> Any:
    found.append(x)
    return x


@pytest.mark.parametrize(
    ("change", "said"),
    [(_append, "changed a list or a dictionary"), (lambda x, found: x.clamp_(-9, 9), "changed a tensor")],
)
def test_what_a_module_changes_by_its_data_only_is_refused_when_it_does(change: Any, said: str) -> None:
    def choose(x: Any, found: Any) -> Any:
        return x * 2 if x.max() < 9 else change(x, found)

    class Residual(Net):
        def forward(self, x: Any) -> Any:
            x, found = self.one(x) * 1.0, list[Any]()
            return self.two(self.between(x, found) + x + sum(found))

    model = Residual(Block(choose))
    with torch.no_grad():
        model.one.weight.fill_(1.0)
    stages = split_model(trace_model(model, X), {"between": 1, "two": 2})
    assert torch.equal(run_stages(stages, X), model(**X))
    with pytest.raises(PipelineError, match=f"module 'between' has {said}"):
        run_stages(stages, {"x": 100 * X["x"]})


def test_a_size_of_two_is_not_taken_for_the_samples_of_a_module_that_depends_on_data() -> None:
    def pairs(x: Any) -> Any:
        return (x if x.sum() > 0 else -x).view(-1, 2, 2)

    class Mean(Net):
        def forward(self, x: Any) -> Any:
            y = self.between(self.one(x))
            return self.two(y.flatten(1)) + y.sum(1).sum(1, keepdim=True) / y.shape[1]

    model = Mean(Block(pairs))
    for samples in (2, 5):
        stages = split_model(trace_model(model, {"x": torch.ones(samples, 4)}), {"two": 1})
        for inputs in ({"x": torch.randn(2, 4)}, {"x": torch.randn(7, 4)}):
            assert torch.equal(run_stages(stages, inputs), model(**inputs))


def test_a_number_that_a_module_returns_may_be_another_in_evaluation() -> None:
    class Scaled(Net):
        def forward(self, x: Any) -> Any:
            x, scale = self.between(self.one(x))
            return self.two(x * scale)

    class Scale(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return (x if x.sum() > 0 else -x), (2 if self.training else 1)

    model = Scaled(Scale())
    stages = split_model(trace_model(model, X), {"two": 1})
    assert torch.equal(run_stages(stages, X), model(**X))
    for each in (model, *(part.module for part in stages)):
        each.eval()
    assert torch.equal(run_stages(stages, X), model(**X))


def test_a_module_that_gives_a_shape_runs_as_it_is() -> None:
    class Shaping(Net):
        def forward(self, x: Any) -> Any:
            y, shape = self.between(self.one(x))
            return self.two(y) / shape[-1] + shape[0]

    model = Shaping(Block(lambda x: (x.tanh(), x.shape)))
    stages = split_model(trace_model(model, X), {"two": 1})
    for samples in (3, 5):
        x = torch.randn(samples, 4)
        assert torch.equal(run_stages(stages, {"x": x}), model(x))


class Dividing(Net):
    """Its own code computes with a size that a module's result has."""

    def forward(self, x: Any) -> Any:
        x = self.between(self.one(x))
        return self.two(x / x.shape[1])


class Pooling(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.step, self.dtype = 1, torch.float32

    def forward(self, x: Any) -> Any:
        return x[:, :: self.step].to(self.dtype)


def test_another_size_than_in_the_trace_is_refused_where_code_around_computes_with_it() -> None:
    by_data, pooling = Block(lambda x: x[:, :2] if x.max() > 1e4 else x * 1), Pooling()
    words = {"x": torch.ones(3, 5, 4)}
    changes: list[tuple[Any, Any]] = [(by_data, lambda: None), (pooling, lambda: setattr(pooling, "step", 2))]
    for between, change in changes:
        model = Dividing(between)
        with torch.no_grad():
            model.one.weight.fill_(1.0)
        for place in ({"two": 1}, {"between": 1}):
            stages = split_model(trace_model(model, words), place)
            torch.testing.assert_close(run_stages(stages, words), model(**words))
            change()
            with pytest.raises(PipelineError, match="module 'between' returned a tensor whose dimension 1 is"):
                run_stages(stages, {"x": 1e5 * words["x"]})
            pooling.step = 1


def test_a_module_whose_attribute_changes_the_type_of_its_result_is_refused_when_it_does() -> None:
    model = Net(pooling := Pooling())
    stages = split_model(trace_model(model, X), {"two": 1})
    pooling.dtype = torch.float64
    with pytest.raises(PipelineError, match=r"module 'between' returned a tensor of torch\.float64"):
        run_stages(stages, X)
