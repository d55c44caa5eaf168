"""Python attributes that forward reads: what a pipeline does never depends on where it is cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.attributes import FixedAttributes  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.models import squares  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).view(6, 4)
CUTS = ({"head": 1}, {"block.two": 1}, {"block.one": 0, "drop": 1})  # each with another part of the code in a stage


class Block(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    slope = 1.0  # of the class, until a script sets it

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.temperature, self.weights = 1.0, [1.0, 2.0]

    def forward(self, x: Any) -> Any:
        return self.two((self.one(x) / self.temperature).tanh() * self.weights[0] * self.slope)


class Annealed(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.block, self.drop, self.head, self.is_residual = Block(), nn.Dropout(0.0), nn.Linear(4, 4), True
        self.register_buffer("scale", torch.ones(()))
        self.note, self.calls = "not read", 0
        self.double()

    def forward(self, x: Any) -> Any:
        self.calls += 1  # which nothing depends on
        found = self.block(x)
        return self.head(self.drop(x + found if self.is_residual else found) * self.scale)


CHANGES = (
    ("block", "temperature", 0.5, "module 'block' has another attribute 'temperature'"),
    ("block", "weights", [3.0, 2.0], "module 'block' has another attribute 'weights'"),
    ("block", "slope", 2.0, "module 'block' has another attribute 'slope'"),
    ("", "is_residual", False, "the model has another attribute 'is_residual'"),
)


def _changed(rank: int) -> list[list[str]]:
    """Return the messages of each change under each cut; steps in between succeed, with other attributes changed."""
    every = []
    for stage_of in CUTS:
        torch.manual_seed(0)
        model, told = Annealed(), []
        with pipeline(
            model,
            X,
            squares,
            plan=PlanOptions(stage_of=stage_of, costs="counted"),
            engine=EngineOptions(heartbeat=None),
        ) as run:
            for path, name, value, _ in CHANGES:
                holder = model.get_submodule(path)
                before = getattr(holder, name)
                for do in (run.step, run.evaluate):
                    setattr(holder, name, value)
                    with pytest.raises(PipelineError) as caught:
                        do(X, X)
                    told.append(str(caught.value))
                    setattr(holder, name, before)
                    run.step(X, X)
            model.note, model.drop.p = "changed", 0.5  # one is not read, the other's module is never cut
            model.scale.fill_(0.5)
            told.append(str(run.evaluate(X, X).loss))
            run.is_residual = False
            with pytest.raises(PipelineError, match="is_residual"):
                run.step(X, X)
        every.append(told)
    return every


def test_an_attribute_that_changes_is_refused_on_all_ranks_wherever_the_cut_falls_and_a_buffer_works() -> None:
    one, other = ranks.run(2, _changed)
    assert one == other
    torch.manual_seed(0)
    model = Annealed()
    model.scale.fill_(0.5)
    model.drop.p = 0.0
    for told in one:
        *said, loss = told
        for index, (_, _, value, words) in enumerate(CHANGES):
            for each in said[2 * index : 2 * index + 2]:
                assert words in each
                assert f"and is {value!r}" in each
                assert "as an argument" in each
        assert said == one[0][:-1]
        assert float(loss) > 0
    assert {said[0] for said in one} == {one[0][0]}


class Holding(nn.Module):  # type: ignore[misc]
    """Reads attributes that are no plain values, beside modules that a cut may part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.act, self.both = torch.ones(4), torch.tanh, [torch.ones(4), torch.ones(4)]
        self.setting = {"power": torch.ones(())}
        self.double()

    def inner(self, x: Any) -> Any:
        return x * self.both[1]

    def forward(self, x: Any) -> Any:
        return self.two(self.inner(self.act(self.one(x)) * self.scale) ** self.setting["power"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", torch.full((4,), 2.0)),
        ("act", torch.sigmoid),
        ("both", [torch.ones(4), torch.zeros(4)]),
        ("setting", {"power": torch.zeros(())}),
        ("inner", lambda x: x * 2),
    ],
)
def test_another_tensor_or_function_in_the_place_of_an_attribute_is_seen(name: str, value: Any) -> None:
    model = Holding()
    fixed = FixedAttributes(model, trace_model(model, X).attributes)
    fixed.check()
    before = vars(model).get(name)
    setattr(model, name, value)
    with pytest.raises(PipelineError, match=f"the model has another attribute '{name}'"):
        fixed.check()
    if before is None:
        delattr(model, name)
    else:
        setattr(model, name, before)
    fixed.check()
    model.scale = torch.ones(4)  # the same numbers
    fixed.check()


class Counting(nn.Module):  # type: ignore[misc]
    def __init__(self, *, cached: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.is_built, self.table = not cached, None
        self.double()

    def forward(self, x: Any) -> Any:
        if not self.is_built:
            self.table, self.is_built = torch.arange(4, dtype=x.dtype), True
        x = self.one(x)
        if self.table is None:
            self.calls += 1
            return self.two(x * self.calls)
        return self.two(x * self.table)


def test_a_forward_that_counts_its_calls_is_refused_and_one_that_keeps_a_table_is_not() -> None:
    for model, where in (
        (Counting(), "the model"),
        (nn.Sequential(nn.Linear(4, 4).double(), Counting()), "module '1'"),
    ):
        with pytest.raises(
            PipelineError, match=rf"{where} \(Counting\) changes its own attribute 'calls'.*from 0 to 1"
        ):
            trace_model(model, X)
        assert [each.calls for each in model.modules() if isinstance(each, Counting)] == [0]
    assert not trace_model(Counting(cached=True), X).attributes
    assert not trace_model(nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(4)), X).attributes  # they run as they are


_captured: list[Any] = []


class Capturing(nn.Module):  # type: ignore[misc]
    """Returns what its layers give too, by hooks that its first call registers, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 4)
        self.double()

    def forward(self, x: Any) -> Any:
        if not getattr(self, "has_hooks", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda _module, _inputs, made: _captured.append(made))
            self.has_hooks = True
        _captured.clear()
        for layer in self.layers:
            x = layer(x)
        return {"output": self.head(x), "between": tuple(_captured)}


def test_a_first_call_that_registers_hooks_and_leaves_a_flag_is_taken() -> None:
    model = Capturing()
    stages = split_model(trace_model(model, X), {"layers.1": 1, "head": 2})
    expected = copy.deepcopy(model)(X)
    for _ in range(2):
        found = run_stages(stages, {"x": X})
        torch.testing.assert_close(found["output"], expected["output"])
        torch.testing.assert_close(found["between"], expected["between"])


class CountingOnce(nn.Module):  # type: ignore[misc]
    """Does something else from some call on, and keeps something of the last call beside the count."""

    def __init__(self, step: int, *, keeps: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.step, self.count, self.keeps, self.last = step, 5, keeps, None

    def forward(self, x: Any) -> Any:
        x = self.one(x)
        if self.keeps:
            self.last = x.detach()
        self.count += self.step
        return self.two(x * 2 if self.count < 0 or self.count > 20 else x)


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_count_is_seen_beside_what_a_module_keeps_and_where_it_falls_below_zero(step: int, keeps: bool) -> None:
    with pytest.raises(PipelineError, match="changes its own attribute 'count'"):
        trace_model(CountingOnce(step, keeps=keeps), torch.ones(2, 4))


class Flagging(nn.Module):  # type: ignore[misc]
    """Finds something in the data, and leaves it in an attribute for the code around it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.one, self.value = nn.Linear(4, 4), value
        self.found: Any = [] if isinstance(value, list) else None

    def forward(self, x: Any) -> Any:
        self.found = self.value if float(x.abs().max()) > 50 else type(self.found)() if self.found is not None else None
        return self.one(x).tanh()


class Flagged(nn.Module):  # type: ignore[misc]
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.inner, self.out = Flagging(value), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        x = self.inner(x)
        return self.out(3 * x if self.inner.found else x)


@pytest.mark.parametrize("value", [True, 2, [1]])
def test_an_attribute_that_a_module_sets_by_its_data_is_not_taken_for_the_examples(value: Any) -> None:
    model = Flagged(value)
    stages = split_model(trace_model(model, {"x": torch.ones(3, 4)}), {"out": 1})
    for inputs in ({"x": torch.ones(3, 4)}, {"x": torch.randn(5, 4)}):
        assert torch.equal(run_stages(stages, inputs), model(**inputs))
    with pytest.raises(PipelineError, match="module 'inner' has another attribute 'found' than when"):
        run_stages(stages, {"x": torch.full((3, 4), 100.0)})
