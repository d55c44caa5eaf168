"""A forward that is done again draws the same from Python's, numpy's and a module's own generators, or is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

from everstep.pipeline.engine.engine import Engine  # noqa: E402
from everstep.pipeline.engine.options import EngineOptions  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.record import Untraceable  # noqa: E402
from everstep.pipeline.frontend.script_draws import ScriptDraws  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from everstep.pipeline.frontend.tree import build_tree  # noqa: E402
from everstep.pipeline.graph import stage_graph  # noqa: E402
from everstep.pipeline.schedules import lower_schedule, make_schedule  # noqa: E402
from everstep.pipeline.transport.base import Transport  # noqa: E402
from tests.pipeline.inprocess import Fabric  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
GLOBAL = torch.Generator()
NUMPY = np.random.default_rng(0)
Draw = Callable[["Drawing"], float]


class Attributes(dict[str, Any]):
    """A dictionary that has an attribute of any name."""

    __getattr__ = dict.get


class Drawing(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.legacy, self.system, self.config = np.random.RandomState(0), random.SystemRandom(), Attributes(width=4)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * self.draw(self)


DRAWS: dict[str, Draw] = {
    "python": lambda module: random.random(),
    "numpy": lambda module: float(np.random.random()),
    "a torch.Generator": lambda module: torch.rand(1, generator=module.torch).item(),
    "a numpy.random.Generator": lambda module: float(module.numpy.random()),
    "a numpy.random.RandomState": lambda module: float(module.legacy.random_sample()),
    "a random.Random": lambda module: module.python.random(),
}


def gradients(draw: Draw, recompute: frozenset[int]) -> dict[str, Any]:
    """Those of a step, in one process, where the order of draws is that of the schedule."""
    random.seed(0)
    np.random.seed(0)
    GLOBAL.manual_seed(0)

    def work(transport: Transport) -> dict[str, Any]:
        torch.manual_seed(0)
        found = build_tree(nn.Sequential(nn.Linear(4, 4), Drawing(draw), nn.Linear(4, 4), Drawing(draw)).double())
        stage_of = {node.name: int(node.name in ("2", "3", "output")) for node in found.graph.nodes}
        graph = stage_graph(found.graph, stage_of)
        schedule = lower_schedule(make_schedule("simple", 2, 1, 4, frozenset()), graph)
        parts = split_model(found, stage_of)
        options = EngineOptions(recompute=recompute)
        engine = Engine(dict(enumerate(parts)), schedule, graph, transport, squared, options)
        engine.step({"input": X}, X)
        return {name: each.grad for name, each in engine.parameters.named.items()}

    (found,) = Fabric(1).run(work)
    return found


def squared(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


@pytest.mark.parametrize("name", DRAWS)
def test_a_recomputation_draws_the_same_and_draws_nothing_more(name: str) -> None:
    plain, again = gradients(DRAWS[name], frozenset()), gradients(DRAWS[name], frozenset({0, 1}))
    for weight, expected in plain.items():
        torch.testing.assert_close(again[weight], expected, rtol=1e-12, atol=1e-12, msg=weight)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_recomputation_that_gives_something_else_is_refused_with_what_to_do(stage: int) -> None:
    with pytest.raises(PipelineError, match=rf"stage {stage} gives another value .* out of EngineOptions.recompute"):
        gradients(lambda module: torch.rand(1, generator=GLOBAL).item(), frozenset({stage}))


def draw_beside() -> float:
    return float(NUMPY.random())


class InFunction(Drawing):
    """Draws from a global generator in a function of its file."""

    def forward(self, x: Any) -> Any:
        return self.layer(x) * draw_beside()


class InComprehension(Drawing):
    """Draws from a global generator in a comprehension."""

    def forward(self, x: Any) -> Any:
        return self.layer(x) * sum(number * float(NUMPY.random()) for number in (1, 2))


class InObject(Drawing):
    """Draws from the generator of an object."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.masker = SimpleNamespace(generator=np.random.default_rng(0))

    def forward(self, x: Any) -> Any:
        return self.layer(x) * float(self.masker.generator.random())


@pytest.mark.parametrize("kind", [InFunction, InComprehension, InObject])
def test_a_generator_is_found_in_code_beside_or_within_that_of_a_module_and_in_an_object(kind: Any) -> None:
    model = kind(lambda module: 1.0).double()
    with pytest.raises(Untraceable, match="Python's or numpy's random numbers"):
        trace_model(model, {"x": X})
    draws = ScriptDraws(model)
    with draws.at(draws.get_state()):
        expected = model(X)
    assert torch.equal(model(X), expected)
