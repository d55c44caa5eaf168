"""A chain whose blocks nobody has looked into: they may change what they are given in place, and their buffers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.engine.engine import Engine  # noqa: E402
from everstep.pipeline.engine.options import EngineOptions  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.tree import build_tree  # noqa: E402
from everstep.pipeline.graph import stage_graph  # noqa: E402
from everstep.pipeline.schedules import lower_schedule, make_schedule  # noqa: E402
from everstep.pipeline.transport.base import Transport  # noqa: E402
from tests.pipeline.inprocess import Fabric  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Shift(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def forward(self, x: Any) -> Any:
        return x.add_(1.0)


class Average(nn.Module):  # type: ignore[misc]
    """Subtracts what it has seen of the batch so far."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        x = self.layer(x)
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.5)
        return x * self.seen.clone()  # a later micro-batch writes it before this one's backward


def chain(*, frozen: bool) -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(Shift(), Average(), Shift(), nn.ReLU(inplace=True), Average(), nn.Linear(4, 4)).double()
    made[1].requires_grad_(not frozen)
    return made


def squared(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", [frozenset(), frozenset({0, 1, 2})])
def test_blocks_that_change_what_they_are_given_and_buffers_train_as_in_one_process(
    recompute: frozenset[int], frozen: bool
) -> None:
    alone = chain(frozen=frozen)
    for part in X.split(2):
        (squared(alone(part.clone()), part) / 4).backward()

    def work(transport: Transport) -> tuple[dict[str, Any], dict[str, Any]]:
        found = build_tree(chain(frozen=frozen))
        stage_of = {"0": 0, "1": 0, "2": 1, "3": 2, "4": 2, "5": 2, "output": 2}
        stage_of = {node.name: stage_of[node.name] for node in found.graph.nodes}
        graph = stage_graph(found.graph, stage_of)
        schedule = lower_schedule(make_schedule("1f1b", 3, 3, 4, frozenset()), graph)
        mine = {transport.rank: split_model(found, stage_of)[transport.rank]}
        engine = Engine(mine, schedule, graph, transport, squared, EngineOptions(recompute=recompute))
        given = X.clone()
        engine.step({"input": given}, X)
        assert torch.equal(given, X)
        engine.close()
        return {name: each.grad for name, each in engine.parameters.named.items()}, engine.parameters.buffers

    gradients, buffers = dict[str, Any](), dict[str, Any]()
    for mine, held in Fabric(3).run(work):
        gradients |= mine
        buffers |= held
    for name, each in alone.named_parameters():
        if each.grad is None:
            assert gradients[name] is None
        else:
            torch.testing.assert_close(gradients[name], each.grad, rtol=1e-9, atol=1e-12, msg=name)
    for name, each in alone.named_buffers():
        torch.testing.assert_close(buffers[name], each, rtol=1e-12, atol=1e-12, msg=name)
