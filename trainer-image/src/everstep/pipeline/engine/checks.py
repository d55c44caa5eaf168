"""Check that stages, schedule, graph and transport of an engine fit together."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.engine.stage import RunnableStage, why_not_split
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import StageGraph
from everstep.pipeline.schedules import ActionKind, Limits, Rendezvous, Schedule, validate_schedule
from everstep.pipeline.transport.base import Transport


def check_arguments(
    stages: Mapping[int, RunnableStage],
    schedule: Schedule,
    graph: StageGraph,
    transport: Transport,
    options: EngineOptions,
) -> None:
    """Check what an engine is made of.

    Raises:
        PipelineError: If they do not fit, or the schedule is not proven.
    """
    if len(schedule.ranks) != transport.size:
        raise PipelineError(f"{schedule.name} is for {len(schedule.ranks)} ranks, there are {transport.size}")
    if sorted(stages) != list(schedule.stages_of(transport.rank)):
        raise PipelineError(
            f"{schedule.name} has stages {list(schedule.stages_of(transport.rank))} on rank {transport.rank}, "
            f"which was given {sorted(stages)}"
        )
    if (wrong := validate_schedule(schedule, graph, Rendezvous(), Limits(in_flight=options.in_flight))) is not None:
        raise PipelineError(f"{schedule.name}: {wrong}")
    reduced = {action.stage for action in schedule.ranks[transport.rank] if action.kind is ActionKind.REDUCE}
    if transport.replicas > 1 and (lacking := sorted(stages.keys() - reduced)):
        raise PipelineError(f"{schedule.name} does not reduce the gradients of stages {lacking} over the replicas")
    for action in schedule.ranks[transport.rank]:
        if action.kind is ActionKind.INPUT_GRAD and (why := why_not_split(stages[action.stage])) is not None:
            raise PipelineError(
                f"{schedule.name} splits the backward of stage {action.stage}, which cannot be split: "
                f"{why}; leave the stage out of split="
            )
