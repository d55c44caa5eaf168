"""Weights and buffers that a forward writes: a pipeline calls it for each micro-batch, one process once for a batch."""

from __future__ import annotations

import torch
from torch import nn

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.record import Call, ForwardRecord, iterate_parts

_BatchNorm, _InstanceNorm = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm


def refuse_writes(record: ForwardRecord, times: int) -> None:
    """Check that a forward writes no weight or buffer, beside the statistics of batch normalisation, which the engine
    puts together.

    Args:
        record: Of the model, in training if it was traced in both modes.
        times: How often forward is called for a batch: micro-batches times replicas.

    Raises:
        PipelineError: It does. It names the module and what is written, and says what to do.
    """
    for name in sorted(find_writes(record)):
        path = name.rpartition(".")[0]
        where = f"module {path!r}" if path else "the model"
        module = record.root.module.get_submodule(path)
        kind = "parameter" if isinstance(record.weights.get(name), nn.Parameter) else "buffer"
        advice = (
            "make it with track_running_stats=False"
            if isinstance(module, _InstanceNorm)
            else "write it in the script, after optimizer.step(), or let forward compute from it without writing it"
        )
        raise PipelineError(
            f"forward writes the {kind} {name!r} of {where} ({type(module).__name__}): a pipeline calls forward for "
            f"each micro-batch, {times} times a batch over all replicas, and one process once, from the whole "
            f"batch: {advice}, or take microbatches=1 and one replica; PlanOptions(check=False) trains it as it is"
        )


def find_writes(record: ForwardRecord) -> set[str]:
    """Return the names of the weights and buffers that a forward writes, without those of batch normalisation."""
    found = set(record.replaced)
    for part in iterate_parts(record.root):
        if isinstance(part, Call):
            found.update(f"{part.path}.{name}" if part.path else name for name in part.writes)
        elif not (isinstance(part.owner.module, _InstanceNorm) and not part.owner.training):
            found.update(record.held[memory] for memory in part.mutates if memory in record.held)
    return {name for name in found if not _is_put_together(record.root.module, name)}


def _is_put_together(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(name.rpartition(".")[0])
    return isinstance(module, _BatchNorm) and isinstance(module.running_mean, torch.Tensor)
