"""`smp.DistributedModel`: the module as it is until the first step, then the stages of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from everstep.compat.smdistributed.modelparallel.torch.body import Body, body
from everstep.compat.smdistributed.modelparallel.torch.comm import CommGroup, allgather
from everstep.compat.smdistributed.modelparallel.torch.recompute import wanted
from everstep.compat.smdistributed.modelparallel.torch.refused import Refused
from everstep.compat.smdistributed.modelparallel.torch.state import State, state

PARTIAL = "_smp_is_partial"
Hook = Callable[..., Any]


class DistributedModel(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Wraps the only model of a script. Names of parameters stay those of `module`.

    `trace_execution_times`: the automatic partition measures each part on the first process, instead of counting its
    operations. `average_grads_across_microbatches`: gradients are means over micro-batches, else their sums.
    `backward_passes_per_step`: steps whose gradients are added up. `trace_device`, `overlapping_allreduce`,
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
        now = state()
        if now.model is not None:
            raise RuntimeError("smp.DistributedModel: there is one already, and only one in a script")
        if isinstance(module, nn.parallel.DistributedDataParallel | DistributedModel):
            raise TypeError("smp.DistributedModel wraps the plain module: set ddp in the configuration for replicas")
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}: it must be 1 or more")
        self.module = module
        self._times, self._passes, self._bucket = trace_execution_times, backward_passes_per_step, bucket_cap_mb
        self._average = average_grads_across_microbatches
        self._engine: Any = None
        self._stages: dict[int, Any] = {}
        self._stage_of: dict[str, int] | None = None
        self._hooks: dict[int, Hook] = {}
        self._pending: list[tuple[Mapping[str, Any], bool]] = []
        self._bodies: Sequence[Body] = ()
        self._count = 0
        self._kept: Any = None  # of the engine that a checkpoint was taken of
        self.skipped = False  # whether the last step has no gradients, since one overflowed
        now.model = self

    @property
    def partitioned(self) -> bool:
        """Whether the first step has been."""
        return self._engine is not None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Only in a function with @smp.step."""
        now = body()
        if now is None:
            raise RuntimeError("the model is called outside of a function with @smp.step: its stages are elsewhere")
        return now.model_called(args, kwargs)

    def backward(self, loss: Any, grads: Any = None) -> None:
        """Only in a function with @smp.step, in the place of loss.backward()."""
        now = body()
        if now is None:
            raise RuntimeError("model.backward is called outside of a function with @smp.step")
        now.backward_called(loss, grads)

    def run(self, bodies: Sequence[Body], training: bool) -> None:
        """All micro-batches of a step; then `bodies` on the last process of the pipeline are at their end."""
        now = state()
        first = bodies[0].arguments
        assert first is not None
        given = [self._named(each) for each in bodies]
        if self._engine is None:
            self._partition(now, given[0], first, bodies[0].autocast)
        batch = {name: _joined([each[name] for each in given]) for name in given[0]}
        samples = _samples(given[0]) * len(bodies)
        self._bodies = bodies
        try:
            if training:
                self._train(batch, torch.arange(samples))
            else:
                found = self._engine.evaluate(batch)
                for each, output in zip(bodies, found.outputs, strict=False):
                    each.resume(output)
        finally:
            self._bodies = ()

    def _train(self, batch: Any, numbers: Any) -> None:
        self._count += 1
        done = self._engine.step(batch, numbers, last=self._count % self._passes == 0)
        self.skipped = done.skipped

    def _loss(self, output: Any, numbers: Any) -> Any:
        """In the engine: the function goes on, and says what is differentiated."""
        now = self._bodies[int(numbers[0]) // len(numbers)]
        now.resume(output)
        if now.loss is None:
            raise RuntimeError("the step function did not call model.backward")
        if self._average:
            return now.loss, 1.0
        return now.loss * len(self._bodies), 1.0

    def _named(self, each: Body) -> dict[str, Any]:
        import inspect

        assert each.arguments is not None
        args, kwargs = each.arguments
        return dict(inspect.signature(self.module.forward).bind(*args, **kwargs).arguments)

    def _partition(self, now: State, example: Mapping[str, Any], first: Any, autocast: Any) -> None:
        from everstep.compat.smdistributed.modelparallel.torch import build
        from everstep.pipeline.engine.options import Options
        from everstep.pipeline.frontend.materialise import Seeded, materialise

        now.tracing = True
        try:
            traced, inputs = build.traced_with(self.module, first)
        finally:
            now.tracing = False
        if self._stage_of is None:
            self._stage_of = build.placed(traced, now, inputs, measured=self._times)
        marked = wanted(self.module)
        recompute = {stage for node, stage in self._stage_of.items() if any(node.startswith(name) for name in marked)}
        half = "fp16" if now.config.half or autocast == torch.float16 else "full"
        options = Options(
            precision="bf16" if now.config.bf16 or autocast == torch.bfloat16 else half,
            recompute=frozenset(recompute | (set(range(now.grid.ranks)) if now.config.offload_activations else set())),
            offload=frozenset(range(now.grid.ranks)) if now.config.offload_activations else frozenset(),
            whole=frozenset(name for name, value in example.items() if not _cuttable(value)),
            bucket=self._bucket * 2**20,
            in_flight=max(now.config.active, now.grid.ranks) if now.config.pipeline == "interleaved" else None,
        )
        missing = any(parameter.device.type == "meta" for parameter in self.module.parameters())
        mine = build.stages_of(traced, self._stage_of, now)
        if missing:
            materialise(mine.values(), Seeded(0))
        self._engine = build.engine(traced, self._stage_of, now, self._loss, options, mine)
        self._stages = mine
        self.load_engine_state(self._kept)
        self.train(self.training)
        for given, strict in self._pending:
            self.load_state_dict(given, strict)
        for optimizer in now.optimizers:
            optimizer.after_partition(self)
        for hook in list(self._hooks.values()):
            hook(self, now.optimizers[0] if now.optimizers else None)

    def engine_state(self) -> Any:
        """What a run that goes on has to know beside weights and optimizer: the loss scale, the number of steps."""
        return None if self._engine is None else self._engine.state_dict()

    def load_engine_state(self, kept: Any) -> None:
        """Goes on where `engine_state` was taken, at once or when the model is partitioned."""
        self._kept = kept
        if self._engine is not None and kept is not None:
            self._engine.load_state_dict(kept)

    @property
    def engine(self) -> Any:
        """What runs the stages of this process; None before the first step."""
        return self._engine

    @property
    def stage_of(self) -> dict[str, int]:
        """The partition decision; RuntimeError before there is one."""
        if self._stage_of is None:
            raise RuntimeError("the model is not partitioned yet: run a step first")
        return self._stage_of

    def decide(self, stage_of: Mapping[str, int]) -> None:
        """The partition as a checkpoint has it. RuntimeError if there is another one already."""
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
        """Those of the stages of this process."""
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
        """The whole model's, on all processes of the pipeline: all of them must call it."""
        if not self.partitioned or state().grid.ranks == 1:
            return dict(self.module.state_dict(*args, **kwargs))
        whole: dict[str, Any] = {}
        for part in allgather(_on_cpu(self._own()), CommGroup.PP_GROUP):
            whole.update(part)
        return {name: whole[name] for name in self.module.state_dict() if name in whole}

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """That of the stages of this process, marked as a part."""
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
        """Whole or partial, at once if the model is partitioned, else when it is."""
        if not self.partitioned:
            self._pending.append((state_dict, strict))
            return
        given = {name: value for name, value in state_dict.items() if name != PARTIAL}
        for stage in self._stages.values():
            mine = {name: given[name] for name in stage.module.state_dict() if name in given}
            stage.module.load_state_dict(mine, strict=strict)

    def register_post_partition_hook(self, hook: Hook) -> Any:
        """`hook(model, optimizer)` is called once the model is partitioned, before the first forward."""
        from torch.utils.hooks import RemovableHandle

        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    join = Refused("DistributedModel.join")
    register_comm_hook = Refused("DistributedModel.register_comm_hook")
    save_model = Refused("DistributedModel.save_model")


def _cuttable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _joined(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts)) if _cuttable(parts[0]) else parts[0]


def _samples(example: Mapping[str, Any]) -> int:
    sizes = {len(value) for value in example.values() if _cuttable(value)}
    if len(sizes) != 1:
        raise ValueError(
            f"the model is called with tensors of first dimensions {sorted(sizes)}: all must have the samples"
        )
    return sizes.pop()


def _on_cpu(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in found.items()}
