"""Build an engine from the wrapped module at the first step: traced, split, scheduled; the same on all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from everstep.compat.smdistributed.modelparallel.torch.state import SmpState
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.frontend import StageModule, Traced, split_model
from everstep.pipeline.frontend.materialise import Seeded, materialise_stages
from everstep.pipeline.frontend.placement import complete_placement
from everstep.pipeline.frontend.split import node_modules
from everstep.pipeline.graph import Device, Graph, stage_graph
from everstep.pipeline.schedules import lower_schedule, make_schedule
from everstep.pipeline.transport.gloo import ProcessGroups

SCHEDULES = {"interleaved": "1f1b", "simple": "simple", "_only_forward": "simple"}


def agree_on_partition(
    traced: Traced, now: SmpState, example: Mapping[str, Any], known: Mapping[str, int] | None, *, measured: bool
) -> tuple[int, dict[str, int]]:
    """Return the seed of random numbers and the stage of each node, unless that is `known`, as the first process has
    them.

    All processes call it.

    Args:
        traced: The traced model.
        now: The state of this process.
        example: The arguments of one micro-batch.
        known: The stage of each node, if it is decided already.
        measured: Whether the automatic partition measures the parts, instead of counting their operations.
    """
    box: list[Any] = [None]
    if now.rank == 0:
        stage_of = known
        if stage_of is None:
            auto = now.config.auto_partition
            stage_of = (
                _partition_automatically(traced, now, example, measured) if auto else _partition_manually(traced, now)
            )
        box = [(torch.initial_seed(), stage_of)]
    if now.size > 1:
        dist.broadcast_object_list(box, src=0)
    seed, found = box[0]
    return seed, dict(found)


def _partition_automatically(
    traced: Traced, now: SmpState, example: Mapping[str, Any], measured: bool
) -> dict[str, int]:
    from everstep.pipeline.partition.solve import partition_graph

    nodes = node_modules(traced)
    if measured:
        from everstep.pipeline.profile import measure_graph

        graph: Graph = measure_graph(traced.graph, nodes, example).graph
    else:
        from everstep.pipeline.profile_counted import count_costs

        graph = count_costs(traced.graph, nodes, example).graph
    config = now.config
    found = partition_graph(
        graph,
        config.pipeline_parallel_degree,
        [Device()] * config.pipeline_parallel_degree,
        None,
        config.microbatches,
        memory_weight=config.weight,
        schedule=SCHEDULES[config.pipeline],
    )
    return dict(found[0].stage_of)


def _partition_manually(traced: Traced, now: SmpState) -> dict[str, int]:
    """Partition as `smp.partition` says; what else has parameters is in the default partition, or in that of what it
    uses if that is later: values never go back."""
    chosen, reached = dict(traced.manual), dict[str, int]()
    assert now.config.default_partition is not None
    for node in traced.graph.nodes:  # users after makers
        least = max((reached[name] for name in node.inputs), default=0)
        if node.name not in chosen and (node.parameters or node.ties):
            chosen[node.name] = max(least, now.config.default_partition)
        reached[node.name] = chosen.get(node.name, least)
    return chosen


def make_own_stages(traced: Traced, stage_of: Mapping[str, int], now: SmpState) -> dict[int, StageModule]:
    """Return the stage of this process, by its number."""
    parts = split_model(traced, stage_of)
    return {now.stage_rank: parts[now.stage_rank]} if now.stage_rank < len(parts) else {}


def find_device(module: Any, example: Mapping[str, Any]) -> torch.device:
    """Return the device of this process's stage: that of its data, whatever the model was built on."""
    leaves = [each for each in pytree.tree_leaves(dict(example)) if isinstance(each, torch.Tensor)]
    found = next((each.device for each in leaves if each.device.type not in ("cpu", "meta")), None)
    weights = (each.device for each in module.parameters() if each.device.type != "meta")
    return found or next(weights, torch.device("cpu"))


def fill_stages(
    module: Any, mine: Iterable[StageModule], given: Callable[[str], Any], seed: int, device: torch.device
) -> dict[Any, Any]:
    """Put the stages on their device, and fill those that were built without data.

    Args:
        module: The wrapped module.
        mine: The stages of this process.
        given: Returns what was loaded, by name; KeyError if nothing was: then a parameter has what its module begins
            with.
        seed: The seed of what modules begin with.
        device: The stages' device.

    Returns:
        Which parameters stand for which of the module's now.
    """
    drawn = Seeded(module, seed, _find_initializer(module))

    def source(name: str) -> Any:
        try:
            return given(name)
        except KeyError:
            return drawn(name)

    before = [(stage, dict(stage.module.named_parameters())) for stage in mine]
    materialise_stages(mine, source, device=device)
    made = {}
    for stage, parameters in before:
        stage.module.to(device)
        now = dict(stage.module.named_parameters())
        made.update({old: now[name] for name, old in parameters.items() if now[name] is not old})
    return made


def _find_initializer(module: Any) -> Callable[[Any], object] | None:
    """Return the function by which a module of transformers begins, which its model knows; None for torch's own, which
    know themselves."""
    initialise = getattr(module, "_init_weights", None)
    if initialise is None:
        return None

    def begin(each: Any) -> None:
        if hasattr(each, "reset_parameters"):  # the model may leave modules of torch as they are
            each.reset_parameters()
        initialise(each)

    return begin


def build_engine(
    traced: Traced,
    stage_of: Mapping[str, int],
    now: SmpState,
    loss: Any,
    options: EngineOptions,
    mine: Mapping[int, StageModule],
    device: torch.device,
) -> Engine:
    """Return the engine of this process.

    Raises:
        ValueError: The partition has not as many stages as there are processes in a pipeline.
    """
    stages = now.config.pipeline_parallel_degree
    graph = stage_graph(traced.graph, complete_placement(traced.graph, stage_of))
    if len(graph.stages) != stages:
        raise ValueError(
            f"the partition has {len(graph.stages)} stages, pipeline_parallel_degree is {stages}: set it to that, or "
            "give all stages something"
        )
    traced.record.constants[:] = [each.to(device) for each in traced.record.constants]
    name = SCHEDULES[now.config.pipeline]
    schedule = lower_schedule(make_schedule(name, stages, stages, now.config.microbatches, split=()), graph)
    nccl = device.type == "cuda" and "nccl" in dist.get_backend()
    return Engine(mine, schedule, graph, ProcessGroups(now.grid, device, nccl=nccl), loss, options)
