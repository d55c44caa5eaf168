"""A pipeline as the module that a script sees: one process's stages, under the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from everstep.pipeline.counted_targets import CountedTargets
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.engine.step_result import StepResult
from everstep.pipeline.errors import Everywhere, PipelineError
from everstep.pipeline.frontend.arguments import Arguments, refuse_uncut_targets
from everstep.pipeline.frontend.attributes import FixedAttributes, Reader
from everstep.pipeline.frontend.autocast import refuse_other_autocast
from everstep.pipeline.frontend.fixed_modules import FixedModules
from everstep.pipeline.frontend.fixed_sizes import FixedSizes
from everstep.pipeline.frontend.foreign_weights import PipelineOpen
from everstep.pipeline.frontend.model_modes import ModelModes, ReadModes, SetModes
from everstep.pipeline.frontend.skeleton import follow_modes, join_skeletons
from everstep.pipeline.frontend.stages import StageModule
from everstep.pipeline.half import refuse_half_autocast
from everstep.pipeline.plan import Plan
from everstep.pipeline.transport.control import Control
from everstep.pipeline.transport.grid import Grid
from everstep.pipeline.whole_model_calls import allow_whole_model_calls

OptionsOf = Callable[[str, tuple[int, ...]], Mapping[str, Any]]  # of a parameter, by its name and shape


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
        modules: FixedModules | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.plan, self.grid = engine, plan, grid
        self.replica, self.replicas = engine.transport.replica, engine.transport.replicas
        self.reads, self.data_group = engine.reads, engine.data
        self._arguments, self._shapes, self._control = arguments, dict(shapes), control
        self._stages = dict(stages)
        part = join_skeletons([stage.module for stage in stages.values()])
        self._part = (part,)  # no module of this one, which has its modules as its own
        self._modes: ModelModes | None = None
        self._read_modes, self._set_modes = ReadModes({}, part), SetModes({}, part)
        self._counted: CountedTargets | None = None
        self.training = part.training
        # Its modules are this module's own, so that all names are those of the model; what they are called must not
        # meet this class's attributes, as it would if they were set one by one.
        self._modules, self._parameters, self._buffers = part._modules, part._parameters, part._buffers
        self._non_persistent_buffers_set = part._non_persistent_buffers_set
        self._load_state_dict_pre_hooks = part._load_state_dict_pre_hooks
        self._fixed, self._sizes, self._fixed_modules = fixed, sizes, modules
        self.opened = PipelineOpen()
        self._idle: list[Any] = []
        if fixed is not None:
            fixed.watch([self, *(stage.module for stage in stages.values())])
        if modules is not None:
            modules.watch(self, [part, *(stage.module for stage in stages.values())])

    def step(self, batch: Any = None, targets: Any = None, *, last: bool = True) -> StepResult:
        """Forward and backward of a batch of this replica; the parameters then have the gradients of the mean loss over
        all replicas and micro-batches. The optimizer's step is the script's.

        A batch is given as the example was; a process that reads nothing of it may give None. See `Engine.step`.
        """
        done = self.engine.step(*self._read(batch, targets), last=last)
        for parameter in self._idle if last else ():
            if parameter.grad is not None and not bool(parameter.grad.any()):
                parameter.grad = None
        return done

    def expect_idle(self, names: Collection[str]) -> None:
        """Take gradients of zeros for none where a loss is known not to depend on a parameter.

        Stages send zeros back for a value that the loss does not use, and weight decay would change the parameters
        behind it. In one process these have no gradient.

        Args:
            names: Of these parameters, in the model.
        """
        self._idle = [each for name, each in self.named_parameters() if name in set(names)]

    def follow_model(
        self,
        model: nn.Module,
        opened: Collection[str],
        read: Mapping[Reader, Mapping[bool, bool]],
        set_modes: Mapping[bool, Mapping[str, bool]],
    ) -> None:
        """Have the modes of the model, and give it this pipeline's, from now on.

        Args:
            model: The model that was cut.
            opened: The paths of its modules whose code a cut may open.
            read: The flags that the code of other modules reads, as `Traced.modes`.
            set_modes: The flags that a forward sets, as `Traced.set_modes`.
        """
        self._set_modes = SetModes(set_modes, self._part[0])
        self._modes, self._read_modes = ModelModes(model, opened, self._part[0]), ReadModes(read, self._part[0])

    def watch_targets(self, loss: Any) -> None:
        """Show the targets of each batch to a loss that has to be looked at for some."""
        # Where no loss is computed none is kept: it may refer to the whole model.
        self._counted = loss if isinstance(loss, CountedTargets) and self.engine.reads.targets else None

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
        norm: torch.Tensor = self.engine.clip_gradients(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        return norm

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules here, as the model's own `train` would; all processes do the same."""
        self._part[0].train(mode)
        if self._modes is not None:
            self._modes.spread()
        self._follow_modes()  # and before each step, as a script may set the mode of any module that it finds here
        return self

    def _follow_modes(self) -> None:
        (part,) = self._part
        if self._modes is not None:
            self._modes.adopt()
        self._set_modes.set()
        self.training = part.training
        follow_modes([stage.module for stage in self._stages.values()], part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A pipeline gives no output where it is called."""
        raise PipelineError("a pipeline cannot be called: use run.step(batch, targets) or run.evaluate(batch, targets)")

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
        the model's again, with the weights of this process's stages."""
        self.opened.is_open = False
        allow_whole_model_calls(self.engine)
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

    def __deepcopy__(self, memo: Any) -> Self:
        raise PipelineError(
            "a pipeline cannot be copied, as its processes and connections cannot: keep averages as "
            "{name: each.detach().clone() for name, each in run.named_parameters()}, and change those after each step"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        raise PipelineError(
            "a pipeline cannot be moved or cast: give LayoutOptions(device=…) to pipeline(), and cast the model "
            "before the call"
        )

    def _read(self, batch: Any, targets: Any) -> tuple[Any, Any]:
        device, precision = self.engine.transport.device, self.engine.options.precision
        try:
            refuse_half_autocast(device, precision)
            self._follow_modes()
            if self._fixed_modules is not None:
                self._fixed_modules.check()
            self._read_modes.check()
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
        if self.reads.targets:
            try:
                if self.plan.microbatches > 1:
                    sizes = (len(each) for each in tensors_of([targets, batch]) if each.dim())
                    refuse_uncut_targets(targets, next(sizes, None))
                self._arguments.refuse_changed_targets(batch, targets)
                if self._counted is not None:
                    self._counted.see(targets)
            except PipelineError as error:
                return error, None
        if batch is not None and (self.reads.inputs or self.reads.targets):
            try:
                whole = self._arguments.name(batch)
                if self.reads.inputs:
                    self._arguments.check(whole, self.reads.inputs, is_first=0 in self._stages)
                    self._sizes.check(whole)
                # What others read shows whether they were given the same samples.
                named = {
                    name: map_tensors(each, bring) if name in self.reads.inputs else each
                    for name, each in whole.items()
                }
            except PipelineError as error:
                named = error if self.reads.inputs else None  # told to all, when they agree on the step
        return named, map_tensors(targets, bring) if self.reads.targets else targets


def _in_order(error: BaseException) -> bool:
    """Tell whether an error is no failure of this process: an error that all have raised alike, or an exit with code 0
    or none."""
    return isinstance(error, Everywhere) or (isinstance(error, SystemExit) and not error.code)
