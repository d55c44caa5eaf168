"""A script that drops the model has its memory back while a pipeline trains, and the pipeline's when it has ended."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from everstep.pipeline import pipeline
from tests.checkpoint.ranks import run
from tests.pipeline.grouping import group_options

pytestmark = pytest.mark.torch


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Dropout(0.1))])


def _train_and_drop(rank: int, schedule: str, compiles: bool) -> tuple[set[str], set[str], int]:
    model: Any = _build()
    if compiles:
        model[0].compile(backend="eager")
    names = {name: weakref.ref(each) for name, each in model.named_parameters()}
    x = torch.randn(8, 8)
    with pipeline(
        model, x, lambda out, wanted: (out - wanted).square().sum(dim=1).mean(), targets=x, schedule=schedule,
        microbatches=4, **group_options(costs="counted", heartbeat=60.0),
    ) as pipe:  # fmt: skip
        own = {name for name, _ in pipe.named_parameters()}
        pipe_alive = weakref.ref(pipe)
        optimizer = torch.optim.SGD(pipe.groups(), lr=0.1)
        for _ in range(2):
            pipe.step(x, x)
            optimizer.step()
        del model
        gc.collect()
        during = {name for name, each in names.items() if each() is not None} - own
        pipe.step(x, x)
    del pipe, optimizer
    gc.collect()
    return during, {name for name, each in names.items() if each() is not None}, int(pipe_alive() is not None)


@pytest.mark.parametrize(("schedule", "compiles"), [("1f1b", False), ("zb-h1", False), ("1f1b", True)])
def test_weights_of_other_processes_and_of_ended_pipelines_are_freed(schedule: str, compiles: bool) -> None:
    for during, after, pipes in run(2, _train_and_drop, schedule, compiles):
        assert during == set(), "weights that other processes train stay in this one's memory"
        assert after == set(), "an ended pipeline keeps its weights"
        assert not pipes
