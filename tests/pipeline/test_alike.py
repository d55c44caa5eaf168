"""Equal layers are measured once for all of them, and what is not equal is not taken for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.frontend import trace_model  # noqa: E402
from everstep.pipeline.frontend.alike import group_alike_nodes  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from everstep.pipeline.frontend.split import node_modules, split_model  # noqa: E402
from everstep.pipeline.planning import Wish  # noqa: E402
from everstep.pipeline.prepare import ProcessPosition, look_into, make_plan  # noqa: E402
from everstep.pipeline.profile import EACH, measure_graph  # noqa: E402
from everstep.pipeline.profile_runs import FEWEST, Cost, run_microbatches  # noqa: E402
from everstep.pipeline.transport.control import Control  # noqa: E402
from everstep.pipeline.transport.grid import make_grid  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

X = {"x": torch.randn(4, 8)}
LAYERS = 9
_calls: Counter[int] = Counter()


class Layer(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """A layer that is one node, since it draws, and whose forwards are counted."""

    def __init__(self, number: int, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.number, self.dropout = number, dropout
        self.inside = nn.Linear(8, width)
        self.outside = nn.Linear(width, 8)

    def forward(self, x: Any) -> Any:
        _calls[self.number] += 1
        return x + nn.functional.dropout(self.outside(self.inside(x).relu()), self.dropout, self.training)


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x.sin()


class Halves(nn.Module):  # type: ignore[misc]
    """Slices the features of what it is given, whose number a layer has fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Any) -> Any:
        half = x.shape[-1] // 2
        return self.first(x) + self.second(x[..., :half] * x[..., half:])


def groups(*layers: nn.Module) -> list[list[str]]:
    """Return the numbers of layers that are alike, in groups; one stands before, so that all come after a layer."""
    found = group_alike_nodes(trace_model(Net(Layer(0), *layers), X))
    names = [[name.removeprefix("layers.") for name in each if name.startswith("layers.")] for each in found]
    return [[name for name in each if name != "0"] for each in names if set(each) - {"0"}]


def test_equal_layers_are_alike() -> None:
    assert groups(*map(Layer, range(4))) == [["1", "2", "3", "4"]]


def frozen() -> nn.Module:
    layer = Layer(0)
    layer.inside.weight.requires_grad_(False)
    return layer


def hooked() -> nn.Module:
    layer = Layer(0)
    layer.register_forward_hook(lambda module, given, made: made * 2)
    return layer


class Other(Layer):
    """The same operations, by other code."""


@pytest.mark.parametrize(
    "other",
    [
        lambda: Layer(0, width=16),
        lambda: Layer(0, dropout=0.2),
        frozen,
        hooked,
        lambda: Other(0),
        lambda: Layer(0).eval(),
    ],
    ids=["shape", "argument", "frozen", "hooked", "class", "mode"],
)
def test_what_differs_is_not_alike(other: Any) -> None:
    found = groups(Layer(0), other(), Layer(0), Layer(0))  # what comes after another may be another, too
    assert not any(name.startswith("2") for each in found if {"1", "3", "4"} & set(each) for name in each)
    assert any({"1", "4"} <= set(each) for each in found)


def test_what_depends_on_data_is_alone() -> None:
    class Picks(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x * (1.0 if float(x.detach().sum()) > 0 else 2.0)

    assert groups(Picks(), Picks()) == [["1"], ["2"]]


def test_some_of_equal_nodes_are_timed_for_all() -> None:
    found = trace_model(Net(*map(Layer, range(LAYERS))), X)
    _calls.clear()
    profile = measure_graph(found.graph, node_modules(found), X, groups=group_alike_nodes(found), repeats=5, warmup=1)
    looked = min(_calls.values())
    # The first gets what the model is given, and not what a layer makes, so it is another one.
    assert sorted(number for number in _calls if _calls[number] > looked) == [0, 1, 4, 8]
    assert len({number for number in _calls if _calls[number] > looked}) == EACH + 1
    costs = {node.name: node for node in profile.graph.nodes}
    others = [costs[f"layers.{number}"] for number in (2, 3, 5, 6, 7)]
    assert len({(each.forward, each.input_grad, each.weight_grad, each.unsplit) for each in others}) == 1
    assert others[0].forward > 0
    assert others[0].unsplit
    assert set(profile.spread) == set(costs)


def test_no_more_is_measured_than_is_needed_when_it_takes_long() -> None:
    found = trace_model(Net(Layer(0)), X)
    nodes = {name: node for name, node in node_modules(found).items() if name == "layers.0"}
    values, cost = {"input:x": X["x"]}, Cost()

    def timer(work: Any) -> Any:
        return work(), 1.0

    run_microbatches(
        nodes, values, {"layers.0": cost}, timer, repeats=9, warmup=2, seconds=0.0, agree=lambda late: True
    )
    assert (len(cost.forward), len(cost.backward)) == (2 * FEWEST, FEWEST)
    cost = Cost()
    run_microbatches(nodes, values, {"layers.0": cost}, timer, repeats=4, warmup=2)
    assert (len(cost.forward), len(cost.backward)) == (2 * 4, 4)


def _planned(rank: int) -> dict[int, int]:
    model = Net(*map(Layer, range(LAYERS)))
    found = look_into(model, X, None)
    _calls.clear()
    make_plan(
        model, found, X, Wish(2, 2, (2,), 4), ProcessPosition(make_grid(2, 2), Control(100.0), torch.device("cpu"))
    )
    return dict(_calls)


def test_a_plan_times_each_distinct_layer_and_not_each_layer() -> None:
    for calls in ranks.run(2, _planned):
        assert len(calls) == LAYERS
        assert [number for number in calls if calls[number] > min(calls.values())] == [0, 1, 4, 8]


def test_what_slices_features_whose_number_a_layer_has_fixed_is_grouped_and_cut() -> None:
    model, given = nn.Sequential(Halves(), Halves()), torch.randn(6, 8)
    found = trace_model(model, given[:3])
    sizes = [len(each) for each in group_alike_nodes(found)]
    assert sum(sizes) == len(found.units.all)
    stages = split_model(found, {"0.second": 1, "1.first": 2})
    torch.testing.assert_close(run_stages(stages, {"input": given}), model(given))
