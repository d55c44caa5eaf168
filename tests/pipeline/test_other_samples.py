"""Scripts whose processes read other samples than each other are told, whatever each of them needs of a batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch


def _train(rank: int, how: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    x, targets = torch.randn(32, 4), torch.arange(32) % 3
    if how == "shuffled":
        order = torch.randperm(32, generator=torch.Generator().manual_seed(rank))
        x, targets = x[order], targets[order]
    if how == "turned":
        x = x * (1 + rank)
    plan = PlanOptions(costs="counted")
    with pipeline(model, x, nn.CrossEntropyLoss(), targets=targets, microbatches=2, plan=plan) as run:
        try:
            if how == "needed":
                run.step(x if run.reads.inputs else None, targets if run.reads.targets else None)
            else:
                run.step(x, targets)
        except PipelineError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("how", "world"), [("shuffled", 2), ("shuffled", 3), ("turned", 2), ("needed", 3)])
def test_samples_that_differ_in_all_are_refused_on_all_ranks(how: str, world: int) -> None:
    found = ranks.run(world, _train, how)
    if how == "shuffled":
        assert all(f"rank 0 and rank {world - 1} were given other samples than each other" in each for each in found)
    else:
        assert found == [""] * world
