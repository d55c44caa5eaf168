"""`everstep.pipeline.pipeline(…)`: what a training script sees of all this."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from everstep.pipeline.comparison import FirstLook, check_samples, compare_stages
from everstep.pipeline.engine.engine import Engine, StepResult
from everstep.pipeline.engine.losses import Loss, compute_loss
from everstep.pipeline.engine.microbatch import batch_size
from everstep.pipeline.engine.nested import map_tensors
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.engine.wide import more_words
from everstep.pipeline.errors import Everywhere, PipelineError
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.attributes import FixedAttributes
from everstep.pipeline.frontend.autocast import autocast_of, refuse_other_autocast
from everstep.pipeline.frontend.fixed_sizes import FixedSizes
from everstep.pipeline.frontend.materialise import Seeded, Source, materialise_stages
from everstep.pipeline.frontend.skeleton import follow_modes, join_skeletons
from everstep.pipeline.frontend.split import split_model
from everstep.pipeline.frontend.stages import StageModule
from everstep.pipeline.frontend.trace import Traced
from everstep.pipeline.frontend.tree import Tree
from everstep.pipeline.frontend.writes import refuse_writes
from everstep.pipeline.half import refuse_half_autocast, refuse_half_parameters, refuse_half_regions
from everstep.pipeline.job import read_job
from everstep.pipeline.joining import (
    by_nccl,
    check_options,
    check_schedule,
    find_place,
    meet_processes,
    require_agreement,
    watch_processes,
)
from everstep.pipeline.left_behind import WatchedLoss, check_left_behind
from everstep.pipeline.partition.solve import Objective
from everstep.pipeline.plan import WORDS, Plan
from everstep.pipeline.planning import Wish
from everstep.pipeline.prepare import (
    Costs,
    ProcessPosition,
    ProfileRequest,
    look_into,
    make_example_microbatch,
    make_plan,
    require_file,
    with_full_backwards,
)
from everstep.pipeline.recut import Recut
from everstep.pipeline.schedules import Schedule
from everstep.pipeline.transport.control import Control
from everstep.pipeline.transport.gloo import ProcessGroups
from everstep.pipeline.transport.grid import Grid
from everstep.pipeline.transport.roll_call import RollCall
from everstep.pipeline.unsupported import refuse_unsupported

__all__ = ["Pipeline", "StepResult", "pipeline"]

_log = logging.getLogger("everstep.pipeline")
OptionsOf = Callable[[str, tuple[int, ...]], Mapping[str, Any]]  # of a parameter, by its name and shape


def pipeline(
    model: nn.Module,
    example: Any,
    loss: Loss,
    *,
    targets: Any = None,
    stages: int | None = None,
    data_parallel: int | None = None,
    global_batch: int | None = None,
    microbatches: int | None = None,
    schedule: str | Schedule | None = None,
    placement: str = "cluster",
    optimize: Objective | None = None,
    memory_weight: float | None = None,
    memory: int | None = None,
    optimizer_words: float = WORDS,
    plan_file: str | os.PathLike[str] | None = None,
    plan_from: Literal["profile", "file"] | None = None,
    stage_of: Mapping[str, int] | None = None,
    blocks: Sequence[str | nn.Module] | None = None,
    weights: Source | None = None,
    device: torch.device | str | None = None,
    costs: Costs = "measured",
    recompute: bool | Collection[int] = False,
    check: bool = True,
    heartbeat: float | None = 60.0,
    timeout: float = 1800.0,
    **options: Any,
) -> Pipeline:
    """This process's part of the model, as a pipeline that trains. All processes call it, with the same arguments,
    after `init_process_group`.

    What is left out of stages, microbatches, schedule, optimize, plan_file and plan_from is as the TrainingJob says, if
    there is one, else as said here.

    model: as it is; without weights (built under `torch.device("meta")`) if it is too large for one process.
    example: a batch: a tensor, a tuple of positional arguments, or a mapping by names; the samples are the first
    dimension. loss(output, targets): (sum, count), or a mean over samples (or what loss_weight= says). targets: the
    example's; with them the plan knows what the loss takes.

    stages: in one pipeline: as many as processes (over data_parallel), a divisor, then the rest are replicas, or a
    multiple. data_parallel: replicas. global_batch: samples of a step of all replicas, by default the example's for
    each. microbatches, schedule: the best by default. placement: cluster, spread, or an order of the letters D, P, T.
    optimize: speed, or memory, with memory_weight from 0 to 1. memory: bytes that a rank may take for parameters,
    gradients, optimizer (`optimizer_words` bytes for each byte of parameters) and activations.
    plan_file: where the plan is kept between runs; plan_from: "file" if it must be there. stage_of: modules or nodes by
    hand. blocks: a chain, for what cannot be traced. weights: for a model without any: a state dictionary, or a
    function of names; else its modules' initialisers, seeded. device: that of the example by default. costs: "counted"
    for what no device here can measure. recompute: all stages, or some, do their forward again. check: one micro-batch
    is compared with the whole model's, if that is here. heartbeat: seconds of silence after which a process is lost;
    timeout: of a message. Others go to `engine.options.EngineOptions`: precision, clip, seed, offload, loss_weight, …

    PipelineError, on all processes, if something of it cannot be.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise PipelineError("call torch.distributed.init_process_group first, under torchrun or in a TrainingJob")
    for what, seconds in (("heartbeat", heartbeat), ("timeout", timeout)):
        if seconds is not None and not seconds > 0:
            raise PipelineError(f"{what} is a time in seconds above 0, not {seconds}")
    roll = RollCall()
    control = meet_processes(roll, timeout, heartbeat)
    with watch_processes(control, heartbeat, roll) as heart:
        said = control.all(read_job)
        asked = {
            "stages": stages or said.stages,
            "data_parallel": data_parallel,
            "global_batch": global_batch,
            "microbatches": microbatches or said.microbatches,
            "schedule": schedule or said.schedule,
            "placement": placement,
            "optimize": optimize or said.optimize,
            "memory_weight": memory_weight,
            "memory": memory,
            "optimizer_words": optimizer_words,
            "plan_from": plan_from or said.plan_from,
            "stage_of": stage_of,
            "blocks": len(blocks or ()),
            "costs": costs,
            "recompute": recompute,
            "check": check,
            "loss": loss,
            "weights": "a state dictionary" if isinstance(weights, Mapping) else weights,
            **options,
        }
        require_agreement(control, model, asked)
        kept = plan_file or said.plan_file
        path = Path(kept) if kept is not None else None
        uncut = frozenset(options.get("whole", ()))

        def asked_for() -> tuple[Arguments, dict[str, Any], ProcessPosition, Wish]:
            check_options(options)
            if isinstance(asked["schedule"], Schedule):
                check_schedule(asked["schedule"])
            refuse_unsupported(model)
            refuse_half_parameters(model, options.get("precision", "full"))
            if isinstance(loss, nn.Module) and any(each.requires_grad for each in loss.parameters()):
                raise PipelineError("the loss has parameters, which would not learn: make it a part of the model")
            arguments = Arguments(model if blocks is None else _resolve_module(model, blocks[0]))
            named = arguments.name(example)
            here = find_place(control, named, device, asked["stages"], data_parallel, placement)
            samples, many = batch_size(named, uncut), asked["microbatches"]
            wish = Wish(
                ranks=here.grid.ranks,
                stages=asked["stages"],
                microbatches=(many,) if many else (),
                batch=samples if global_batch is None else -(-global_batch // here.grid.replicas),
                schedule=asked["schedule"],
                objective=asked["optimize"] or "speed",
                memory_weight=memory_weight,
                memory=memory,
                words=optimizer_words + (more_words(model.parameters()) if options.get("fp32_gradients") else 0.0),
            )
            return arguments, named, here, wish

        arguments, named, here, wish = control.all(asked_for)
        here = replace(here, nccl=by_nccl(here))
        if asked["plan_from"] == "file":
            control.first(lambda: require_file(path))
        how = options.get("precision", "full")
        cast = autocast_of(how, here.device.type)

        def looked_into() -> Traced | Tree:
            found = look_into(model, named, blocks, uncut, autocast=cast)
            if isinstance(found, Traced):
                refuse_half_regions(found.record, how)
            return found

        found = control.all(looked_into)
        weight = options.get("loss_weight")
        left = found.left if check and isinstance(found, Traced) else ()
        if check and targets is not None:  # before anything else calls the loss
            control.first(lambda: check_left_behind(model, left, named, targets, loss, weight, uncut))

        def refuse_if_cut(microbatches: int) -> int:
            number = microbatches * here.grid.replicas
            if check and number > 1 and isinstance(found, Traced):
                record = found.record
                control.all(lambda: refuse_writes(record, number))
            return number

        refuse_if_cut(asked["microbatches"] or 1)  # before anything is measured, if that is known
        made = make_plan(
            model, found, named, wish, here,
            ProfileRequest(
                costs, cast, lambda output, own: compute_loss(loss, output, own, batch_size(own) or 1, weight).sum,
                targets, uncut,
            ),
            stage_of=stage_of, path=path, aim=asked["optimize"] is not None and asked["plan_from"] == "profile",
        )  # fmt: skip

        times = refuse_if_cut(made.microbatches)

        def cut() -> tuple[Plan, Sequence[StageModule], Schedule]:
            parts = split_model(found, made.stage_of)
            fitted = with_full_backwards(made, parts)
            return fitted, parts, fitted.prove()

        made, parts, actions = control.all(cut)
        if check:
            control.first(
                lambda: compare_stages(model, found, parts, make_example_microbatch(named, wish, uncut), cast)
            )
        trained = WatchedLoss(loss, model, left) if left else loss
        if check and times > 1:
            if targets is None:
                trained = FirstLook(trained, weight)
            control.first(
                lambda: "" if targets is None else check_samples(model, found, named, targets, loss, weight, uncut)
            )

        transport = ProcessGroups(here.grid, here.device, nccl=here.nccl, control=control)
        own = {index: parts[index] for index in actions.stages_of(transport.rank)}

        def fill() -> None:
            source = weights if weights is not None else Seeded(model, options.get("seed", 0))
            materialise_stages(own.values(), source, device=here.device)
            for stage in own.values():
                stage.module.to(here.device)

        recut = Recut(model)
        control.all(fill)
        recut.carry_weights(own, control)
        if isinstance(found, Traced):
            arguments.traced_with(named)
            found.record.constants[:] = [each.to(here.device) for each in found.record.constants]
        again = frozenset(range(len(parts)) if recompute is True else recompute or ())
        engine = Engine(own, actions, made.stages, transport, trained, EngineOptions(recompute=again, **options))
        recut.remember(own, engine)
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        fixed = FixedAttributes(model, found.attributes, cast) if isinstance(found, Traced) else None
        if heart is not None:
            engine.watch = heart
            heart.follow(lambda: engine.progress, lambda: engine.passes)
        sizes = found.sizes if isinstance(found, Traced) else FixedSizes()
        return Pipeline(engine, own, made, here.grid, arguments, shapes, control, fixed, sizes)


class Pipeline(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """One process's part of a model, under the model's own names: a module whose parameters an optimizer takes, and
    whose state a checkpoint saves and restores, at any number of stages. It is run by `step` and `evaluate`.

    `plan`: with its prediction and reasons; `replica` of `replicas`: which part of the data is this process's; `reads`:
    what it needs of a batch, others may be None; `data_group`: the processes with the same stages.
    """

    def __init__(
        self,
        engine: Engine,
        stages: Mapping[int, StageModule],
        plan: Plan,
        grid: Grid,
        arguments: Arguments,
        shapes: Mapping[str, tuple[int, ...]],
        control: Control,
        fixed: FixedAttributes | None = None,
        sizes: FixedSizes = FixedSizes(),  # noqa: B008 - it is frozen
    ) -> None:
        super().__init__()
        self.engine, self.plan, self.grid = engine, plan, grid
        self.replica, self.replicas = engine.transport.replica, engine.transport.replicas
        self.reads, self.data_group = engine.reads, engine.data
        self._arguments, self._shapes, self._control = arguments, dict(shapes), control
        self._stages = dict(stages)
        part = join_skeletons([stage.module for stage in stages.values()])
        self._part = (part,)  # no module of this one, which has its modules as its own
        self.training = part.training
        # Its modules are this module's own, so that all names are those of the model; what they are called must not
        # meet this class's attributes, as it would if they were set one by one.
        self._modules, self._parameters, self._buffers = part._modules, part._parameters, part._buffers
        self._non_persistent_buffers_set = part._non_persistent_buffers_set
        self._fixed, self._sizes = fixed, sizes
        if fixed is not None:
            fixed.watch([self, *(stage.module for stage in stages.values())])

    def step(self, batch: Any = None, targets: Any = None, *, last: bool = True) -> StepResult:
        """Forward and backward of a batch of this replica; the parameters then have the gradients of the mean loss over
        all replicas and micro-batches. The optimizer's step is the script's.

        A batch is given as the example was; a process that reads nothing of it may give None. See `Engine.step`.
        """
        return self.engine.step(*self._read(batch, targets), last=last)

    def evaluate(self, batch: Any = None, targets: Any = None) -> StepResult:
        """Forward only, in the mode that the modules are in (`eval`, `train`); without targets there is no loss."""
        return self.engine.evaluate(*self._read(batch, targets))

    def groups(self, options: OptionsOf = lambda name, shape: {}) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer; `options(name, shape)` are those of a parameter, by its name in the model.

        The groups are those of the whole model, in the same order on all processes, with those of this one's parameters
        in them that learn now: also where it has none, so that schedulers and checkpoints fit.
        """
        here = {name: each for name, each in self.named_parameters() if each.requires_grad}
        found: list[tuple[dict[str, Any], list[Any]]] = []
        for name, shape in self._shapes.items():
            wanted = dict(options(name, shape))
            group = next((known for known in found if known[0] == wanted), None)
            if group is None:
                group = wanted, []
                found.append(group)
            if name in here:
                group[1].append(here[name])
        return [{**wanted, "params": parameters} for wanted, parameters in found]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all processes by the norm of all of them, between `step` and the optimizer's.

        It does what `torch.nn.utils.clip_grad_norm_` does in one process, which here would see the gradients of this
        process only. A shared parameter and the replicas count once. All processes call it alike.

        Args:
            max_norm: The largest norm; with `inf` nothing changes.
            norm_type: 2 for the Euclidean norm, `inf` for the largest element, or any number above 0.
            error_if_nonfinite: Whether a norm that is `inf` or not a number is an error, and not only given back.

        Returns:
            The norm before, a scalar in float64; the same on all processes.

        Raises:
            PipelineError: On all processes, if they do not ask for the same, or for what no norm can be.
        """
        return self.engine.clip_gradients(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules here, as the model's own `train` would; all processes do the same."""
        self._part[0].train(mode)
        self._follow_modes()  # and before each step, as a script may set the mode of any module that it finds here
        return self

    def _follow_modes(self) -> None:
        (part,) = self._part
        self.training = part.training
        follow_modes([stage.module for stage in self._stages.values()], part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A pipeline gives no output where it is called."""
        raise PipelineError("a pipeline is not called: use run.step(batch, targets) or run.evaluate(batch, targets)")

    def get_extra_state(self) -> dict[str, Any]:
        """Return the number of steps that are done, from which random numbers follow, and the loss scale."""
        return self.engine.state_dict()

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_extra_state` was called."""
        self.engine.load_state_dict(state)

    def extra_repr(self) -> str:
        """Describe the position of this process in the pipeline."""
        own = ", ".join(map(str, self._stages))
        return (
            f"stages {own} of {len(self.plan.placement)}, rank {self.engine.rank} of {self.grid.ranks}, replica "
            f"{self.replica} of {self.replicas}, {self.plan.schedule_name}, {self.plan.microbatches} micro-batches"
        )

    def close(self) -> None:
        """Take leave of the others: that this process ends is no loss, unless they begin another step. The modules are
        the model's again."""
        self.engine.close()
        if self.engine.watch is not None:
            self.engine.watch.stop()
        self._control.retire()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.engine.watch is not None and not _in_order(error):
            self.engine.watch.fail(error)
        self.close()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        raise PipelineError(
            "a pipeline stays where and as it was made: give device= to pipeline(), cast the model before"
        )

    def _read(self, batch: Any, targets: Any) -> tuple[Any, Any]:
        device, precision = self.engine.transport.device, self.engine.options.precision
        try:
            refuse_half_autocast(device, precision)
            self._follow_modes()
            for stage in self._stages.values():
                stage.check_mode()
            if self._fixed is not None:
                self._fixed.check()
                refuse_other_autocast(self._fixed.autocast, precision, device.type)
        except PipelineError as error:
            return error, None  # told to all, when they agree on the step

        def bring(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        named: Any = None
        if self.reads.inputs and batch is not None:
            try:
                whole = self._arguments.name(batch)
                self._arguments.check(whole, self.reads.inputs)
                self._sizes.check(whole)
                named = {name: map_tensors(whole[name], bring) for name in self.reads.inputs if name in whole}
            except PipelineError as error:
                named = error  # told to all, when they agree on the step
        return named, map_tensors(targets, bring) if self.reads.targets else None


def _resolve_module(model: nn.Module, block: str | nn.Module) -> nn.Module:
    found: nn.Module = model.get_submodule(block) if isinstance(block, str) else block
    return found


def _in_order(error: BaseException) -> bool:
    """Tell whether an error is no failure of this process: an error that all have raised alike, or an exit with code 0
    or none."""
    return isinstance(error, Everywhere) or (isinstance(error, SystemExit) and not error.code)
