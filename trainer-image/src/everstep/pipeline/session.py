"""`everstep.pipeline.pipeline(…)`: an ordinary model becomes a pipeline step by step, on all processes alike."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from everstep.coordination.arrivals import RollCall
from everstep.keywords import explain_keywords
from everstep.pipeline.building import build_pipeline, mark_weights_of_others
from everstep.pipeline.cutting import plan_and_cut, trace_requested_model
from everstep.pipeline.engine.losses import Loss
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.foreign_weights import lend_foreign
from everstep.pipeline.frontend.script_draws import ScriptDraws
from everstep.pipeline.joining import meet_processes, watch_processes
from everstep.pipeline.module import Pipeline
from everstep.pipeline.negotiation import PipelineRequest, negotiate
from everstep.pipeline.options import LayoutOptions, PlanOptions
from everstep.pipeline.schedules import Schedule
from everstep.pipeline.whole_model_calls import refuse_whole_model_calls


@explain_keywords(layout=LayoutOptions, plan=PlanOptions, engine=EngineOptions)
def pipeline(
    model: nn.Module,
    example: Any,
    loss: Loss,
    *,
    targets: Any = None,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str | Schedule | None = None,
    layout: LayoutOptions | None = None,
    plan: PlanOptions | None = None,
    engine: EngineOptions | None = None,
) -> Pipeline:
    """Make this process's part of a model, as a pipeline that trains.

    All processes call it with the same arguments, after `init_process_group`. What is left out of `stages`,
    `microbatches`, `schedule` and some of `plan` is as the TrainingJob says, if there is one, else as said here.

    Args:
        model: The model as it is; without weights (built under `torch.device("meta")`) if it is too large for one
            process.
        example: A batch, whose first dimension is the samples: a tensor, a tuple of positional arguments, or a mapping
            by names.
        loss: A function of (output, targets) that returns (sum, count), or a mean over samples, or over what
            `EngineOptions.loss_weight` says.
        targets: Those of the example; with them the plan knows what the loss takes, and the loss is checked.
        stages: The number of stages: a divisor of the number of processes, then the rest are replicas, or a multiple of
            it. None for one on each process (over `LayoutOptions.data_parallel`).
        microbatches: The number of micro-batches of a step; None for the best.
        schedule: A name, or a schedule that was read from a file; None for the best.
        layout: Replicas, batch, devices and weights.
        plan: How the model is cut, what the plan is best for, and where it is kept.
        engine: Precision, clipping, recomputation, heartbeats and what else a run is made of.

    Returns:
        The pipeline: a module with this process's part of the model, a context manager, and `step` and `evaluate`.

    Raises:
        PipelineError: Something of it cannot be; on all processes.
        RankLost: Another process is lost, or does not come in time.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise PipelineError("call torch.distributed.init_process_group first, under torchrun or in a TrainingJob")
    layout, plan, engine = layout or LayoutOptions(), plan or PlanOptions(), engine or EngineOptions()
    request = PipelineRequest(model, example, loss, targets, stages, microbatches, schedule, layout, plan, engine)
    roll = RollCall("pipeline()", engine.timeout)
    control = meet_processes(roll, engine.timeout, engine.heartbeat)
    draws = ScriptDraws(model)
    kept = draws.at(draws.get_state())  # who looks at a model runs its forward, which may draw
    with watch_processes(control, engine.heartbeat, roll) as heart, lend_foreign(model), kept:
        terms = negotiate(control, request)
        found = trace_requested_model(terms)
        cut = plan_and_cut(terms, found)
        run = build_pipeline(terms, cut, heart)
        mark_weights_of_others(model, cut, run)
        refuse_whole_model_calls(run.engine)
        return run
