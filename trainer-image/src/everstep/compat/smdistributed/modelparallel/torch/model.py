"""`smp.DistributedModel`: the module as it is until the first step, then the stages of this process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from everstep.compat.smdistributed.modelparallel.torch.comm import CommGroup, allgather
from everstep.compat.smdistributed.modelparallel.torch.recompute import list_marked_modules
from everstep.compat.smdistributed.modelparallel.torch.refused import NotOfferedName
from everstep.compat.smdistributed.modelparallel.torch.state import SmpState, current_state
from everstep.compat.smdistributed.modelparallel.torch.step_body import StepBody, get_current_body
from everstep.pipeline.engine.microbatch import Parts
from everstep.pipeline.engine.nested import map_tensors
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.skeleton import replace_tensor
from everstep.pipeline.unsupported import refuse_unsupported

PARTIAL = "_smp_is_partial"
Hook = Callable[..., Any]


class DistributedModel(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Wraps the only model of a script. Names of parameters stay those of `module`.

    `trace_execution_times`: the automatic partition measures each part on the first process, instead of counting its
    operations. `average_grads_across_microbatches`: gradients are means over micro-batches, else their sums.
    `backward_passes_per_step`: steps whose gradients are added up before they are reduced. As in torch, gradients that
    nobody has set to zero are added to. `trace_device`, `overlapping_allreduce`,
    `trace_memory_usage`, `broadcast_buffers` and `gradient_as_bucket_view` change nothing: tracing needs no device,
    and reductions always overlap.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: int = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__()
        now = current_state()
        if now.model is not None:
            raise RuntimeError("smp.DistributedModel: there is one already, and only one in a script")
        if isinstance(module, nn.parallel.DistributedDataParallel | DistributedModel):
            raise TypeError("smp.DistributedModel wraps the plain module: set ddp in the configuration for replicas")
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}: it must be 1 or more")
        refuse_unsupported(module)
        self.module = module
        self._arguments = Arguments(module)
        self._before: list[tuple[Any, Any]] = []  # parameters with the gradients that the next ones are added to
        self._times, self._passes, self._bucket = trace_execution_times, backward_passes_per_step, bucket_cap_mb
        self._average = average_grads_across_microbatches
        self._engine: Any = None
        self._stages: dict[int, Any] = {}
        self._stage_of: dict[str, int] | None = None
        self._hooks: OrderedDict[int, Hook] = OrderedDict()  # a plain one cannot be referred to weakly
        self._pending: list[tuple[Mapping[str, Any], bool]] = []
        self._bodies: list[StepBody] = []
        self._count = 0
        self._kept: Any = None  # of the engine that a checkpoint was taken of
        self.skipped = False  # whether the last step has no gradients, since one overflowed
        now.model = self

    @property
    def partitioned(self) -> bool:
        """Return whether the first step has been."""
        return self._engine is not None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, in a function with @smp.step only."""
        now = get_current_body()
        if now is None:
            raise RuntimeError("the model is called outside of a function with @smp.step: its stages are elsewhere")
        return now.pause_for_output(args, kwargs)

    def backward(self, loss: Any, grads: Any = None) -> None:
        """Take the place of loss.backward(), in a function with @smp.step only."""
        now = get_current_body()
        if now is None:
            raise RuntimeError("model.backward is called outside of a function with @smp.step")
        now.note_backward(loss, grads)

    def get_module(self) -> nn.Module:
        """Return the module that is wrapped."""
        return self.module

    def run(self, bodies: list[StepBody], training: bool) -> None:
        """Run all micro-batches of a step; then `bodies` on the last process of the pipeline are at their end."""
        batch = Parts(self._arguments.of_call(*each.arguments) for each in bodies if each.arguments is not None)
        for part in batch:
            self._arguments.check(part)
        if self._engine is None:
            self._partition(current_state(), batch[0], bodies[0].autocast)
        self._bodies = bodies
        try:
            if training:
                self._train(batch)
            else:
                found = self._engine.evaluate(batch)
                for each, output in zip(bodies, found.outputs, strict=False):
                    each.resume(self._cast_output(output))
        finally:
            self._bodies = []

    def _train(self, batch: Parts) -> None:
        if self._count % self._passes == 0:
            own = self._engine.parameters.own  # the engine forgets their gradients
            self._before = [(each, each.grad) for each in own if each.grad is not None]
        self._count += 1
        done = self._engine.step(batch, torch.arange(len(batch), device="cpu"), last=self._count % self._passes == 0)
        self.skipped = done.skipped
        if self._count % self._passes == 0:
            for parameter, gradient in self._before if not self.skipped else ():
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
            self._before = []

    def _loss(self, output: Any, numbers: Any) -> Any:
        """Return the loss: in the engine the function goes on, and says what is differentiated."""
        index = int(numbers[0])
        if self._bodies[index].is_finished:
            self._bodies[index] = self._bodies[index].rerun()
        now = self._bodies[index]
        now.resume(self._cast_output(output))
        if now.loss is None:
            raise RuntimeError(
                "the step function names model.backward and has not called it: call it, or the function under "
                "torch.no_grad() where it is an evaluation"
            )
        # The engine makes means of all that was added up.
        return now.loss * (self._passes * (1 if self._average else len(self._bodies))), 1.0

    def _cast_output(self, output: Any) -> Any:
        """Return the model's output as the function gets it: where the configuration, and not the function, asked for
        less precision, losses have the full one."""
        if not (current_state().config.half or current_state().config.bf16):
            return output
        low = torch.float16, torch.bfloat16
        return map_tensors(output, lambda each: each.float() if each.dtype in low else each)

    def _partition(self, now: SmpState, example: Mapping[str, Any], autocast: Any) -> None:
        from everstep.compat.smdistributed.modelparallel.torch.build import StepRequest, build_step

        half = "fp16" if now.config.half or autocast == torch.float16 else "full"
        built = build_step(
            StepRequest(
                module=self.module,
                example=example,
                loss=self._loss,
                given=self._find_loaded,
                precision="bf16" if now.config.bf16 or autocast == torch.bfloat16 else half,
                bucket=self._bucket * 2**20,
                known=self._stage_of,
                marked=list_marked_modules(self.module),
                measured=self._times,
            ),
            now,
        )
        self._engine, self._stages, self._arguments = built.engine, dict(built.stages), built.arguments
        self._stage_of = dict(built.stage_of)
        self.load_engine_state(self._kept)
        self.train(self.training)
        for given, strict in self._pending:
            self.load_state_dict(given, strict)
        self._pending = []
        for optimizer in now.optimizers:
            optimizer.after_partition(self, built.made)
        for hook in list(self._hooks.values()):
            hook(self, now.optimizers[0] if now.optimizers else None)

    def _find_loaded(self, name: str) -> Any:
        """Return what was loaded before there was a partition. Raises KeyError if nothing was."""
        for given, _ in reversed(self._pending):
            if name in given:
                return given[name]
        raise KeyError(name)

    def engine_state(self) -> Any:
        """Return what a run that goes on has to know beside weights and optimizer: the loss scale, the number of
        steps."""
        return None if self._engine is None else self._engine.state_dict()

    def load_engine_state(self, kept: Any) -> None:
        """Go on where `engine_state` was taken, at once or when the model is partitioned."""
        self._kept = kept
        if self._engine is not None and kept is not None:
            self._engine.load_state_dict(kept)

    @property
    def engine(self) -> Any:
        """Return the engine that runs the stages of this process; None before the first step."""
        return self._engine

    @property
    def stage_of(self) -> dict[str, int]:
        """Return the partition decision. Raises RuntimeError before there is one."""
        if self._stage_of is None:
            raise RuntimeError("the model is not partitioned yet: run a step first")
        return self._stage_of

    def set_partition(self, stage_of: Mapping[str, int]) -> None:
        """Set the partition as a checkpoint has it. Raises RuntimeError if there is another one already."""
        if self.partitioned and dict(stage_of) != self._stage_of:
            raise RuntimeError("the checkpoint has another partition than the model: load it before the first step")
        self._stage_of = dict(stage_of)

    def train(self, mode: bool = True) -> DistributedModel:
        super().train(mode)
        for stage in self._stages.values():
            stage.module.train(mode)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return iter(self.module.named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return iter(self.module.named_buffers(*args, **kwargs))

    def local_named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of the stages of this process, with their names."""
        return self._local("named_parameters", prefix, recurse)

    def local_parameters(self, recurse: bool = True) -> Iterator[Any]:
        return (each for _, each in self.local_named_parameters(recurse=recurse))

    def local_named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
        return self._local("named_buffers", prefix, recurse)

    def local_buffers(self, recurse: bool = True) -> Iterator[Any]:
        return (each for _, each in self.local_named_buffers(recurse=recurse))

    def local_named_modules(self, memo: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
        self.stage_of  # noqa: B018
        for stage in self._stages.values():
            yield from stage.module.named_modules(memo, prefix)

    def local_modules(self) -> Iterator[Any]:
        return (each for _, each in self.local_named_modules())

    def _local(self, what: str, prefix: str, recurse: bool) -> Iterator[tuple[str, Any]]:
        if not self.partitioned:
            raise RuntimeError("the model is not partitioned yet: run a step first")
        for stage in self._stages.values():
            yield from getattr(stage.module, what)(prefix, recurse)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the whole model's state, on all processes of the pipeline: all of them must call it."""
        if not self.partitioned or current_state().grid.ranks == 1:
            return dict(self.module.state_dict(*args, **kwargs))
        whole: dict[str, Any] = {}
        for part in allgather(copy_to_cpu(self._own()), CommGroup.PP_GROUP):
            whole.update(part)
        # What no stage uses is the same everywhere.
        return {name: whole.get(name, value) for name, value in self.module.state_dict().items()}

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of the stages of this process, marked as a part."""
        return {
            **(self._own() if self.partitioned else self.module.state_dict(*args, **kwargs)),
            PARTIAL: self.partitioned,
        }

    def _own(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for stage in self._stages.values():
            found.update(stage.module.state_dict())
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole or partial state, at once if the model is partitioned, else when it is; all processes of the
        pipeline call it. Partial ones of another partition are put together."""
        if not self.partitioned:
            self._pending.append((state_dict, strict))
            return
        given = merge_parts(state_dict, {name for stage in self._stages.values() for name in stage.module.state_dict()})
        if strict and (unknown := sorted(given.keys() - self.module.state_dict().keys())):
            raise RuntimeError(f"the model has no {', '.join(unknown)}, which the state dictionary has")
        for stage in self._stages.values():
            mine = {name: given[name] for name in stage.module.state_dict() if name in given}
            stage.module.load_state_dict(mine, strict=strict)

    def cpu(self) -> DistributedModel:
        """Put the whole model, with the weights of all stages, on the processor of every process: all of the pipeline
        call it, when training is over."""
        if self.partitioned:
            whole = self.state_dict()
            for named in (self.module.named_parameters(), self.module.named_buffers()):
                for name, tensor in [each for each in named if each[0] in whole]:
                    if tensor.device.type == "meta":
                        replace_tensor(
                            self.module, tensor, nn.Parameter(whole[name], requires_grad=tensor.requires_grad)
                        )
                    else:
                        tensor.data = whole[name].detach().cpu()
        super().cpu()
        return self

    def register_post_partition_hook(self, hook: Hook) -> Any:
        """Have `hook(model, optimizer)` called once the model is partitioned, before the first forward."""
        from torch.utils.hooks import RemovableHandle

        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    join = NotOfferedName("DistributedModel.join")
    register_comm_hook = NotOfferedName("DistributedModel.register_comm_hook")
    save_model = NotOfferedName("DistributedModel.save_model")
    distributed_modules = NotOfferedName("DistributedModel.distributed_modules")
    is_distributed_parameter = NotOfferedName("DistributedModel.is_distributed_parameter")
    is_distributed_buffer = NotOfferedName("DistributedModel.is_distributed_buffer")
    is_scaled_batch_parameter = NotOfferedName("DistributedModel.is_scaled_batch_parameter")
    is_scaled_batch_buffer = NotOfferedName("DistributedModel.is_scaled_batch_buffer")
    default_reducer_named_parameters = NotOfferedName("DistributedModel.default_reducer_named_parameters")
    scaled_batch_reducer_named_parameters = NotOfferedName("DistributedModel.scaled_batch_reducer_named_parameters")


def merge_parts(given: Mapping[str, Any], needed: Collection[Any], key: str | None = None) -> dict[str, Any]:
    """Return what is in `given`, of all processes of the pipeline if it is a part and one of them lacks of it what it
    needs. Collective for parts.

    Args:
        given: A state dictionary.
        needed: The names that this process needs.
        key: The entry of `given` to take; None: all of it.
    """
    own = {name: value for name, value in (given if key is None else given[key]).items() if name != PARTIAL}
    if given.get(PARTIAL) and current_state().grid.ranks > 1:
        lacks = any(name not in own for name in needed)
        if any(allgather(lacks, CommGroup.PP_GROUP)):
            parts = allgather(copy_to_cpu(own), CommGroup.PP_GROUP)
            return {name: value for part in parts for name, value in part.items()}
    return own


def copy_to_cpu(found: Any) -> Any:
    """Return the same structure with its tensors on the processor, as it can be told to others."""
    return pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, found)
