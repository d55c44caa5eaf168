"""Weights and buffers that a forward writes: a pipeline calls it for each micro-batch, one process once for a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.batch_statistics import are_statistics_put_together
from everstep.pipeline.frontend.record import Call, ForwardRecord, iterate_parts
from everstep.pipeline.frontend.refs import Weight, iterate_references

_InstanceNorm = nn.modules.instancenorm._InstanceNorm


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


def refuse_reads_of_statistics(record: ForwardRecord) -> None:
    """Check that a forward in training reads no running statistics of batch normalisation beside the layer itself.

    Args:
        record: Of the model, in training if it was traced in both modes.

    Raises:
        PipelineError: It does. They are put together when a step ends, and are those of the step before until then.
    """
    for part in iterate_parts(record.root):
        if isinstance(part, Call) or not part.owner.training:
            continue
        for ref in iterate_references(part.inputs):
            if not isinstance(ref, Weight) or isinstance(record.weights.get(ref.name), nn.Parameter):
                continue
            path = ref.name.rpartition(".")[0]
            module = record.root.module.get_submodule(path)
            if module is not part.owner.module and module.training and _is_put_together(record.root.module, ref.name):
                raise PipelineError(
                    f"forward reads the buffer {ref.name!r} of module {path!r} ({type(module).__name__}) in training, "
                    "beside the layer itself: a pipeline combines these statistics when a step ends, and until "
                    "then they are those of the step before. Let forward compute from the activations, or put the "
                    "layer in evaluation mode; PlanOptions(check=False) trains it as it is"
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


def only_reads_statistics(owner: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of torch's batch or instance normalisation reads running statistics only, though the module
    whose code it is trains, and is not one that the engine looks after: as in a layer that is frozen by its own code.

    Args:
        owner: The call of the module whose code it is.
        args: The arguments of the function, whose sixth says whether it takes the statistics of what it is given.
        kwargs: The same by name.
    """
    takes = kwargs.get("training", kwargs.get("use_input_stats", args[5] if len(args) > 5 else True))
    return owner.training and takes is False and not are_statistics_put_together(owner.module)


def _is_put_together(model: nn.Module, name: str) -> bool:
    return are_statistics_put_together(model.get_submodule(name.rpartition(".")[0]))
