"""From the wrapped module to an engine, at the first step: traced, split, scheduled; the same on all processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from everstep.compat.smdistributed.modelparallel.torch.state import State
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.options import Options
from everstep.pipeline.frontend import StageModule, Traced, split, trace
from everstep.pipeline.frontend.placement import complete
from everstep.pipeline.frontend.split import node_modules
from everstep.pipeline.graph import Device, Graph, stage_graph
from everstep.pipeline.schedules import lower, make
from everstep.pipeline.transport.gloo import ProcessGroups

SCHEDULES = {"interleaved": "1f1b", "simple": "simple", "_only_forward": "simple"}


def placed(traced: Traced, now: State, example: Mapping[str, Any], *, measured: bool) -> dict[str, int]:
    """The stage of each node: what the first process chooses, on all."""
    box: list[Any] = [None]
    if now.rank == 0:
        box = [_automatic(traced, now, example, measured) if now.config.auto_partition else _manual(traced, now)]
    if now.size > 1:
        dist.broadcast_object_list(box, src=0)
    found: dict[str, int] = box[0]
    return found


def _automatic(traced: Traced, now: State, example: Mapping[str, Any], measured: bool) -> dict[str, int]:
    from everstep.pipeline.partition.solve import partition

    nodes = node_modules(traced)
    if measured:
        from everstep.pipeline.profile import measure

        graph: Graph = measure(traced.graph, nodes, example).graph
    else:
        from everstep.pipeline.profile_counted import count

        graph = count(traced.graph, nodes, example).graph
    config = now.config
    found = partition(
        graph,
        config.pipeline_parallel_degree,
        [Device()] * config.pipeline_parallel_degree,
        None,
        config.microbatches,
        memory_weight=config.weight,
        schedule=SCHEDULES[config.pipeline],
    )
    return dict(found[0].stage_of)


def _manual(traced: Traced, now: State) -> dict[str, int]:
    """As `smp.partition` says; what else has parameters is in the default partition."""
    chosen = dict(traced.manual)
    assert now.config.default_partition is not None
    for node in traced.graph.nodes:
        if node.name not in chosen and (node.parameters or node.ties):
            chosen[node.name] = now.config.default_partition
    return chosen


def stages_of(traced: Traced, stage_of: Mapping[str, int], now: State) -> dict[int, StageModule]:
    """The stage of this process, by its number."""
    return {now.stage_rank: split(traced, stage_of)[now.stage_rank]}


def engine(
    traced: Traced, stage_of: Mapping[str, int], now: State, loss: Any, options: Options, mine: dict[int, StageModule]
) -> Engine:
    """ValueError if the partition has not as many stages as there are processes in a pipeline."""
    stages = now.config.pipeline_parallel_degree
    graph = stage_graph(traced.graph, complete(traced.graph, stage_of))
    if len(graph.stages) != stages:
        raise ValueError(f"the partition has {len(graph.stages)} stages, pipeline_parallel_degree is {stages}")
    name = SCHEDULES[now.config.pipeline]
    schedule = lower(make(name, stages, stages, now.config.microbatches, split=()), graph)
    device = next((each.device for each in mine[now.stage_rank].module.parameters()), torch.device("cpu"))
    return Engine(mine, schedule, graph, ProcessGroups(now.grid, device), loss, options)


def traced_with(module: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Traced, dict[str, Any]]:
    """The trace of a micro-batch, and its arguments by name."""
    import inspect

    args, kwargs = arguments
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    return trace(module, dict(bound)), dict(bound)
