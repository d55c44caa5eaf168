"""A chain of equal stages of real work, for everstep and for torch.distributed.pipelining alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.graph import Stage, StageGraph, make_chain_graph
from everstep.pipeline.schedules import Schedule, lower_schedule, make_schedule
from everstep.pipeline.transport.base import Transport

#: Stages on each rank.
CHUNKS = {"simple": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


@dataclass(frozen=True)
class ChainWork:
    """Each rank has `layers` layers of `width`, however many stages they are; `rows` of a micro-batch.

    A rank has fewer operations for each byte that it sends than with one layer of a transformer of that width.
    """

    schedule: str
    ranks: int = 2
    microbatches: int = 8
    width: int = 1024
    rows: int = 128
    layers: int = 8
    precision: str = "full"

    @property
    def stages(self) -> int:
        return self.ranks * CHUNKS[self.schedule]

    @property
    def graph(self) -> StageGraph:
        return make_chain_graph([Stage()] * self.stages, 4 * self.width * self.rows)

    @property
    def order(self) -> Schedule:
        """Return the computations of each rank."""
        return make_schedule(self.schedule, self.stages, self.ranks, self.microbatches)

    def module(self, stage: int) -> nn.Module:
        torch.manual_seed(stage)
        layers = self.layers // CHUNKS[self.schedule]
        made = OrderedDict[str, nn.Module]()
        for layer in range(stage * layers, (stage + 1) * layers):
            made |= {f"linear{layer}": nn.Linear(self.width, self.width), f"tanh{layer}": nn.Tanh()}
        return nn.Sequential(made)

    def batch(self) -> Any:
        return torch.randn(self.rows * self.microbatches, self.width, generator=torch.Generator().manual_seed(1))


class ChainStage:
    """A RunnableStage of a chain."""

    def __init__(self, stage: int, stages: int, module: nn.Module) -> None:
        self.inputs: tuple[str, ...] = (f"v{stage - 1}" if stage else "input:x",)
        self.outputs: tuple[str, ...] = (f"v{stage}" if stage < stages - 1 else "output",)
        self.module = module

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self.outputs[0]: self.module(values[self.inputs[0]])}


def loss(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def engine(work: ChainWork, transport: Transport, modules: Mapping[int, nn.Module]) -> Engine:
    parts = {stage: ChainStage(stage, work.stages, module) for stage, module in modules.items()}
    schedule = lower_schedule(work.order, work.graph)
    return Engine(
        parts, schedule, work.graph, transport, loss, EngineOptions(broadcast=False, precision=work.precision)
    )
