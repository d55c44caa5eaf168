"""A parameter in several stages is one parameter: summed, counted and stepped as in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from everstep.pipeline import pipeline
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.transport.base import Transport
from tests.checkpoint import ranks
from tests.pipeline.by_hand import cut, recipe
from tests.pipeline.grouping import group_options
from tests.pipeline.inprocess import Fabric
from tests.pipeline.models import CASES
from tests.pipeline.training import Setting, alone, apart, piped, schedule_of

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_shared_parameter_is_counted_once_in_the_norm_of_all_gradients(replicas: int) -> None:
    # A clip far below the norm: a norm that counted the embedding twice would leave other weights.
    setting = Setting("gpt", stages=3, ranks=3, replicas=replicas, options=EngineOptions(clip=0.01), steps=1)
    trained = piped(setting)
    norm = trained.outputs[0].norm
    unclipped = alone(replace(setting, options=EngineOptions()))
    expected = torch.nn.utils.get_total_norm([g for g in unclipped.gradients.values() if g is not None])
    assert norm == pytest.approx(float(expected), rel=1e-12)
    assert apart(trained, alone(setting)) < 1e-10


def test_owners_on_one_rank_and_on_others_share_one_sum() -> None:
    # T5's embedding has three owners; with two stages on each of two ranks, two of them are on one rank.
    setting = Setting("t5", "interleaved", stages=4, ranks=2, samples=6, microbatches=2)
    assert apart(piped(setting), alone(setting)) < 1e-10


def test_all_owners_begin_with_the_weights_of_the_master() -> None:
    def work(transport: Transport) -> Any:
        setting = Setting("gpt", stages=3, ranks=3)
        model = CASES["gpt"].build(seed=transport.rank)  # every rank has drawn others
        parts, graph = cut(model, recipe("gpt", model), 3)
        engine = Engine(
            {transport.rank: parts[transport.rank]}, schedule_of(setting, graph), graph, transport, lambda o, t: o
        )
        return engine.parameters.shared.get("wte.weight")

    first, middle, last = Fabric(3).run(work)
    assert middle is None
    assert torch.equal(first, last)
    assert torch.equal(first, CASES["gpt"].build(seed=0).wte.weight)


def test_copies_of_a_shared_parameter_on_one_rank_are_refused() -> None:
    def work(transport: Transport) -> None:
        one, other = CASES["gpt"].build(), CASES["gpt"].build()
        parts, graph = cut(one, recipe("gpt", one), 3)
        copies, _ = cut(other, recipe("gpt", other), 3)
        setting = Setting("gpt", "interleaved", stages=3, ranks=1, microbatches=2)
        stages = {0: parts[0], 1: parts[1], 2: copies[2]}
        Engine(stages, schedule_of(setting, graph), graph, transport, CASES["gpt"].loss)

    with pytest.raises(PipelineError, match=r"that share 'wte.weight' must have it as one tensor"):
        Fabric(1).run(work)


class Projected(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Two layers behind one random projection, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("projection", torch.randn(4, 4))

    def forward(self, x: Any) -> Any:
        return self.two(self.one(x @ self.projection).tanh() @ self.projection)


def _project(rank: int) -> Any:
    torch.manual_seed(rank)
    x = torch.linspace(-1.0, 1.0, 16).view(4, 4)
    placed = {"one": 0, ":matmul.1": 1, "two": 1}
    how = group_options(stage_of=placed, costs="counted", heartbeat=None, microbatches=2)
    with pipeline(Projected(), x, lambda output, target: (output - target).square().mean(), targets=x, **how) as run:
        return dict(run.named_buffers())["projection"].tolist()


def test_a_buffer_that_several_stages_use_is_one_where_each_process_has_drawn_others() -> None:
    torch.manual_seed(0)
    first = Projected().projection.tolist()
    assert ranks.run(2, _project) == [first, first]
