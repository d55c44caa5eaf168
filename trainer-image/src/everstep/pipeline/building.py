"""Build what runs: this process's stages with their weights, groups, and the engine: the last step of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from everstep.coordination.heartbeat import Heartbeat
from everstep.pipeline.cutting import CutModel
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.attributes import FixedAttributes
from everstep.pipeline.frontend.fixed_modules import FixedModules
from everstep.pipeline.frontend.fixed_sizes import FixedSizes
from everstep.pipeline.frontend.foreign_weights import mark_foreign
from everstep.pipeline.frontend.materialise import Seeded, materialise_stages
from everstep.pipeline.frontend.record import ForwardRecord, iterate_parts
from everstep.pipeline.frontend.stages import StageModule
from everstep.pipeline.frontend.trace import Traced
from everstep.pipeline.frontend.tree import Tree
from everstep.pipeline.module import Pipeline
from everstep.pipeline.negotiation import PipelineTerms
from everstep.pipeline.recut import Recut, remember_tables
from everstep.pipeline.transport.gloo import ProcessGroups


def build_pipeline(terms: PipelineTerms, cut: CutModel, heart: Heartbeat | None) -> Pipeline:
    """Build this process's part of a pipeline. Collective.

    Args:
        terms: The terms on which all processes agree.
        cut: The model in stages.
        heart: The heartbeats of all processes, which follow the engine from now on; None without.

    Returns:
        The pipeline, ready to train.

    Raises:
        PipelineError: On all processes: weights are missing, or the processes cannot be connected.
    """
    found, position, model = cut.found, terms.position, terms.request.model
    transport = ProcessGroups(position.grid, position.device, nccl=position.nccl, control=terms.control)
    own = {index: cut.stages[index] for index in cut.schedule.stages_of(transport.rank)}
    if terms.request.plan.check and cut.plan.microbatches * position.grid.replicas > 1:
        for stage in own.values():
            stage.refuse_late_writes()
    recut = Recut(model)
    terms.control.run_on_all_ranks(lambda: _fill_stages(terms, own, found))
    recut.carry_weights(own, terms.control)
    if terms.request.engine.broadcast:
        _share_buffers(terms, cut, transport.rank)
    if isinstance(found, Traced):
        given = found.record.given
        changed = {given[each] for part in iterate_parts(found.record.root) for each in part.mutates if each in given}
        terms.arguments.traced_with(terms.example, changed, found.record.laid_out, found.given)
        found.record.constants[:] = [each.to(position.device) for each in found.record.constants]
    options = replace(terms.request.engine, dynamic=terms.request.engine.dynamic | found.varying)
    engine = Engine(own, cut.schedule, cut.plan.stages, transport, cut.loss, options)
    engine.least = cut.least
    recut.remember(own, engine)
    remember_tables(model, found.left if isinstance(found, Traced) else ())
    if heart is not None:
        engine.watch = heart
        heart.follow(lambda: engine.progress, lambda: engine.passes)
    run = Pipeline(
        engine,
        own,
        cut.plan,
        position.grid,
        terms.arguments,
        {name: tuple(each.shape) for name, each in model.named_parameters()},
        terms.control,
        FixedAttributes(model, found.attributes, terms.autocast) if isinstance(found, Traced) else None,
        found.sizes if isinstance(found, Traced) else FixedSizes(),
        FixedModules(model, found.opened),
    )
    run.expect_idle(cut.idle)
    engine.results.follow(cut.behind, dict(run.named_parameters()))
    read, set_modes = (found.modes, found.set_modes) if isinstance(found, Traced) else ({}, {})
    run.follow_model(model, found.opened, read, set_modes)
    run.watch_targets(cut.loss)
    return run


def _share_buffers(terms: PipelineTerms, cut: CutModel, rank: int) -> None:
    """Give each buffer that several processes have the value of its first stage: scripts that seed each process for
    itself make others, as of random projections. Collective."""
    control, grid = terms.control, terms.position.grid
    holders: dict[str, dict[int, Any]] = {}
    for stage in cut.stages:
        for name, buffer in stage.module.named_buffers(remove_duplicate=False):
            holders.setdefault(name, {}).setdefault(cut.plan.placement[stage.index], buffer)
    for _, held in sorted(holders.items()):
        if len(held) > 1:
            buffer, own = next(iter(held.values())), held.get(rank)
            here = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu") if own is None else own
            data = control.broadcast_tensor(here, grid.processes[0][next(iter(held))])
            if own is not None:
                own.copy_(data)


def mark_weights_of_others(model: nn.Module, cut: CutModel, run: Pipeline) -> None:
    """Let this process's copies of what other stages train be read no more, nor those of buffers that they write.

    Args:
        model: The model that was cut.
        cut: Its stages.
        run: This process's pipeline.
    """
    holders: dict[str, tuple[int, ...]] = {}
    for stage in cut.stages:
        for name, _ in _iterate_tensors(stage.module, every_name=True):
            holders[name] = (*holders.get(name, ()), stage.index)
    own = set(cut.schedule.stages_of(run.engine.rank))
    written = {name for stage in cut.stages for name in stage.writes}
    parameters = {name for name, _ in model.named_parameters()}
    foreign = {
        name: ("parameter" if name in parameters else "buffer", tensor)
        for name, tensor in _iterate_tensors(model)
        if name in parameters | written and own.isdisjoint(holders.get(name, ()))
    }
    mark_foreign(foreign, holders, cut.plan.placement, run.opened)


def _iterate_tensors(module: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(remove_duplicate=not every_name)
    yield from module.named_buffers(remove_duplicate=not every_name)


def _refuse_moved_views(record: ForwardRecord, device: torch.device) -> None:
    """Refuse views of parameters that a forward has kept, where they would be in other memory than these."""
    for index, name in record.aliases.items():
        if record.constants[index].device != device:
            raise PipelineError(
                f"forward reads a tensor that shares memory with the parameter {name!r}, as a view of it that is kept "
                f"in an attribute; on {device} it would share none, and never change: let forward make the view from "
                "the parameter itself"
            )


def _fill_stages(terms: PipelineTerms, own: Mapping[int, StageModule], found: Traced | Tree) -> None:
    """Put the stages of this process on its device, with their weights."""
    request, device = terms.request, terms.position.device
    if isinstance(found, Traced):
        _refuse_moved_views(found.record, device)
    weights = request.layout.weights
    source = weights if weights is not None else Seeded(request.model, request.engine.seed)
    materialise_stages(own.values(), source, device=device)
    for stage in own.values():
        stage.module.to(device)
