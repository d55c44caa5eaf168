"""Build what runs: this process's stages with their weights, groups, and the engine: the last step of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.coordination.heartbeat import Heartbeat
from everstep.pipeline.cutting import CutModel
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.frontend.attributes import FixedAttributes
from everstep.pipeline.frontend.fixed_sizes import FixedSizes
from everstep.pipeline.frontend.materialise import Seeded, materialise_stages
from everstep.pipeline.frontend.stages import StageModule
from everstep.pipeline.frontend.trace import Traced
from everstep.pipeline.module import Pipeline
from everstep.pipeline.negotiation import PipelineTerms
from everstep.pipeline.recut import Recut
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
    recut = Recut(model)
    terms.control.run_on_all_ranks(lambda: _fill_stages(terms, own))
    recut.carry_weights(own, terms.control)
    if isinstance(found, Traced):
        terms.arguments.traced_with(terms.example)
        found.record.constants[:] = [each.to(position.device) for each in found.record.constants]
    engine = Engine(own, cut.schedule, cut.plan.stages, transport, cut.loss, terms.request.engine)
    recut.remember(own, engine)
    if heart is not None:
        engine.watch = heart
        heart.follow(lambda: engine.progress, lambda: engine.passes)
    return Pipeline(
        engine,
        own,
        cut.plan,
        position.grid,
        terms.arguments,
        {name: tuple(each.shape) for name, each in model.named_parameters()},
        terms.control,
        FixedAttributes(model, found.attributes, terms.autocast) if isinstance(found, Traced) else None,
        found.sizes if isinstance(found, Traced) else FixedSizes(),
    )


def _fill_stages(terms: PipelineTerms, own: Mapping[int, StageModule]) -> None:
    """Put the stages of this process on its device, with their weights."""
    request, device = terms.request, terms.position.device
    weights = request.layout.weights
    source = weights if weights is not None else Seeded(request.model, request.engine.seed)
    materialise_stages(own.values(), source, device=device)
    for stage in own.values():
        stage.module.to(device)
