"""Build an engine from the wrapped module at the first step, as `pipeline()` does: negotiate, trace, plan, build."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from everstep.compat.smdistributed.modelparallel.torch.state import SmpState
from everstep.pipeline import EngineOptions, LayoutOptions, PlanOptions
from everstep.pipeline.building import build_pipeline
from everstep.pipeline.cutting import plan_and_cut, trace_requested_model
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.materialise import Seeded
from everstep.pipeline.frontend.stages import StageModule
from everstep.pipeline.graph import Graph
from everstep.pipeline.negotiation import PipelineRequest, negotiate
from everstep.pipeline.transport.control import Control

SCHEDULES = {"interleaved": "1f1b", "simple": "simple", "_only_forward": "simple"}


@dataclass(frozen=True)
class StepRequest:
    """The first step's request for an engine.

    Attributes:
        module: The wrapped module.
        example: The arguments of one micro-batch, by name.
        loss: The loss of a micro-batch, by its output and its number.
        given: Returns what was loaded, by name; KeyError if nothing was: then a parameter has what its module begins
            with.
        precision: The type of the computations.
        bucket: The bytes of gradients that are reduced at once.
        known: The stage of each node, if it is decided already.
        marked: The modules whose stages do their forward again.
        measured: Whether the automatic partition measures the parts, instead of counting their operations.
    """

    module: Any
    example: Mapping[str, Any]
    loss: Callable[[Any, Any], Any]
    given: Callable[[str], Any]
    precision: str
    bucket: int
    known: Mapping[str, int] | None
    marked: Collection[str]
    measured: bool


@dataclass(frozen=True)
class BuiltStep:
    """The engine of this process, with what belongs to it.

    Attributes:
        engine: The engine of this process.
        stages: The stages of this process, by number.
        stage_of: The stage of each node.
        arguments: The model's arguments, which must be as they were traced.
        made: Which parameters stand for which of the module's now.
    """

    engine: Engine
    stages: Mapping[int, StageModule]
    stage_of: Mapping[str, int]
    arguments: Arguments
    made: Mapping[Any, Any]


def build_step(asked: StepRequest, now: SmpState) -> BuiltStep:
    """Partition the module, and build the engine of this process. All processes call it.

    Args:
        asked: What the first step asks for.
        now: The state of this process.

    Returns:
        What was built.

    Raises:
        PipelineError: The module cannot be cut, or not into as many stages as there are processes in a pipeline.
    """
    control = Control(EngineOptions.timeout)
    seed = control.run_on_first_rank(torch.initial_seed)
    terms = negotiate(control, _make_request(asked, now, seed))
    now.tracing = True
    try:
        found = trace_requested_model(terms)
    finally:
        now.tracing = False
    placed = asked.known
    if placed is None and not now.config.auto_partition:
        placed = _partition_manually(found.graph, found.manual, now)
    terms = replace(terms, request=replace(terms.request, plan=replace(terms.request.plan, stage_of=placed)))
    cut = plan_and_cut(terms, found)
    again = {stage for node, stage in cut.plan.stage_of.items() if any(_is_within(node, each) for each in asked.marked)}
    engine = terms.request.engine
    if not now.config.offload_activations:
        engine = replace(engine, recompute=frozenset(again))
    own = {index: cut.stages[index] for index in cut.schedule.stages_of(now.stage_rank)}
    before = [(stage, dict(stage.module.named_parameters())) for stage in own.values()]
    run = build_pipeline(replace(terms, request=replace(terms.request, engine=engine)), cut, None)
    made: dict[Any, Any] = {}
    for stage, parameters in before:
        after = dict(stage.module.named_parameters())
        made.update({old: after[name] for name, old in parameters.items() if after[name] is not old})
    return BuiltStep(run.engine, own, cut.plan.stage_of, terms.arguments, made)


def _make_request(asked: StepRequest, now: SmpState, seed: int) -> PipelineRequest:
    """Return what `pipeline()` would be asked for."""
    config, drawn = now.config, Seeded(asked.module, seed)
    stages = config.pipeline_parallel_degree
    samples = max((len(each) for each in pytree.tree_leaves(dict(asked.example)) if _has_samples(each)), default=1)

    def weights(name: str) -> Any:
        try:
            return asked.given(name)
        except KeyError:
            return drawn(name)

    return PipelineRequest(
        asked.module,
        dict(asked.example),
        lambda output, number: asked.loss(output, number),  # a function that is the same on all processes
        targets=None,
        stages=stages,
        microbatches=config.microbatches,
        schedule=SCHEDULES[config.pipeline],
        layout=LayoutOptions(
            data_parallel=now.grid.replicas,
            global_batch=samples * config.microbatches * now.grid.replicas,
            placement=config.placement,
            device=_find_device(asked.module, asked.example),
            weights=weights,
        ),
        plan=PlanOptions(
            memory_weight=config.weight,
            costs="measured" if asked.measured else "counted",
            check=False,
            source="profile",
        ),
        engine=EngineOptions(
            seed=seed,
            precision=asked.precision,
            recompute=config.offload_activations,
            offload=frozenset(range(stages)) if config.offload_activations else frozenset(),
            bucket=asked.bucket,
            in_flight=max(config.active, stages) if config.pipeline == "interleaved" else None,
            heartbeat=None,
        ),
    )


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _is_within(node: str, module: str) -> bool:
    return not module or node == module or node.startswith(f"{module}.")


def _partition_manually(graph: Graph, placed: Mapping[str, int], now: SmpState) -> dict[str, int]:
    """Partition as `smp.partition` says; what else has parameters is in the default partition, or in that of what it
    uses if that is later: values never go back."""
    chosen, reached = dict(placed), dict[str, int]()
    assert now.config.default_partition is not None
    for node in graph.nodes:  # users after makers
        least = max((reached[name] for name in node.inputs), default=0)
        if node.name not in chosen and (node.parameters or node.ties):
            chosen[node.name] = max(least, now.config.default_partition)
        reached[node.name] = chosen.get(node.name, least)
    return chosen


def _find_device(module: Any, example: Mapping[str, Any]) -> torch.device:
    """Return the device of this process's stage: that of its data, whatever the model was built on."""
    leaves = [each for each in pytree.tree_leaves(dict(example)) if isinstance(each, torch.Tensor)]
    found = next((each.device for each in leaves if each.device.type not in ("cpu", "meta")), None)
    weights = (each.device for each in module.parameters() if each.device.type != "meta")
    return found or next(weights, torch.device("cpu"))
