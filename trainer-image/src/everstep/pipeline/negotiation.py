"""All processes agree on what was asked for, and each finds its part: the first step of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.losses import Loss
from everstep.pipeline.engine.microbatch import batch_size
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.engine.wide import compute_wide_factor
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.arguments import Arguments, refuse_uncut_targets
from everstep.pipeline.frontend.autocast import autocast_of
from everstep.pipeline.half import refuse_half_parameters
from everstep.pipeline.job import read_job
from everstep.pipeline.joining import by_nccl, check_schedule, find_place, require_agreement
from everstep.pipeline.options import LayoutOptions, PlanOptions
from everstep.pipeline.planning import AUTO, Wish
from everstep.pipeline.prepare import ProcessPosition, require_file
from everstep.pipeline.schedules import Schedule
from everstep.pipeline.transport.control import Control
from everstep.pipeline.unsupported import refuse_unsupported


@dataclass(frozen=True)
class PipelineRequest:
    """The arguments of one process's call of `pipeline()`; see there."""

    model: nn.Module
    example: Any
    loss: Loss
    targets: Any
    stages: int | None
    microbatches: int | None
    schedule: str | Schedule | None
    layout: LayoutOptions
    plan: PlanOptions
    engine: EngineOptions

    def describe(self) -> dict[str, Any]:
        """Return what all processes must have asked for alike, by the names of the arguments."""
        weights = self.layout.weights
        return {
            "stages": self.stages,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "data_parallel": self.layout.data_parallel,
            "global_batch": self.layout.global_batch,
            "placement": self.layout.placement,
            "weights": "a state dictionary" if isinstance(weights, Mapping) else weights,
            **self.plan.describe(),
            **self.engine.describe(),
            "loss": self.loss,
            "targets": None if self.targets is None else "given",
        }


@dataclass(frozen=True)
class PipelineTerms:
    """The terms that all processes have agreed on.

    Attributes:
        request: The request, with the TrainingJob's values where the script gave none.
        arguments: The model's arguments, as the example gives them.
        example: The example by the names of arguments.
        position: The position of this process.
        wish: The request for a plan.
        autocast: The type to which steps cast.
    """

    request: PipelineRequest
    arguments: Arguments
    example: Mapping[str, Any]
    position: ProcessPosition
    wish: Wish
    autocast: torch.dtype | None

    @property
    def control(self) -> Control:
        """Return the group of all processes."""
        return self.position.control

    @property
    def plan_file(self) -> Path | None:
        """Return the file where the plan is kept."""
        return None if self.request.plan.file is None else Path(self.request.plan.file)


def negotiate(control: Control, request: PipelineRequest) -> PipelineTerms:
    """Agree with all other processes on the terms of a pipeline. Collective.

    Args:
        control: The group of all processes.
        request: The request of this process.

    Returns:
        The terms, the same on all processes but for each one's position.

    Raises:
        PipelineError: On all processes: they ask for different things, or for what cannot be.
    """
    request = control.run_on_all_ranks(lambda: _complete_request(request))
    require_agreement(control, request.model, request.describe())
    terms = control.run_on_all_ranks(lambda: _find_terms(control, request))
    terms = replace(terms, position=replace(terms.position, nccl=by_nccl(terms.position)))
    if request.plan.source == "file":
        control.run_on_first_rank(lambda: require_file(terms.plan_file))
    return terms


def _complete_request(request: PipelineRequest) -> PipelineRequest:
    """Check the model, and take what the script leaves open from its TrainingJob, if there is one."""
    refuse_unsupported(request.model)  # before anything asks for its shapes, which lazy modules have none of
    job, plan = read_job(), request.plan
    return replace(
        request,
        stages=request.stages or job.stages,
        microbatches=request.microbatches or job.microbatches,
        schedule=request.schedule or job.schedule,
        plan=replace(
            plan,
            optimize=plan.optimize or job.optimize,
            file=plan.file or job.plan_file,
            source=plan.source or job.plan_from,
        ),
    )


def _find_terms(control: Control, request: PipelineRequest) -> PipelineTerms:
    """Check what this process can see of its request alone."""
    model, plan, layout, engine = request.model, request.plan, request.layout, request.engine
    if isinstance(request.schedule, Schedule):
        check_schedule(request.schedule)
    refuse_half_parameters(model, engine.precision)
    if isinstance(request.loss, nn.Module) and any(each.requires_grad for each in request.loss.parameters()):
        raise PipelineError("the loss has parameters, which would not be trained: make it a part of the model")
    arguments = Arguments(model if plan.blocks is None else _resolve_module(model, plan.blocks[0]))
    example = arguments.name(request.example)
    position = find_place(control, example, layout.device, request.stages, layout.data_parallel, layout.placement)
    samples, replicas = batch_size(example, engine.unsplit_inputs), position.grid.replicas
    if request.microbatches != 1:
        refuse_uncut_targets(request.targets, samples)
    wish = Wish(
        ranks=position.grid.ranks,
        stages=request.stages,
        microbatches=(request.microbatches,) if request.microbatches else (),
        batch=samples if layout.global_batch is None else -(-layout.global_batch // replicas),
        schedule=request.schedule or AUTO,
        objective=plan.optimize or "speed",
        memory_weight=plan.memory_weight,
        memory=plan.memory,
        optimizer_factor=plan.optimizer_factor
        + (compute_wide_factor(model.parameters()) if engine.fp32_gradients else 0.0),
    )
    autocast = autocast_of(engine.precision, position.device.type)
    return PipelineTerms(request, arguments, example, position, wish, autocast)


def _resolve_module(model: nn.Module, block: str | nn.Module) -> nn.Module:
    found: nn.Module = model.get_submodule(block) if isinstance(block, str) else block
    return found
