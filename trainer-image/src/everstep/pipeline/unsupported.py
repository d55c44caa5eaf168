"""Refusals of what cannot be trained in a pipeline, before anything is measured or cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.compiled import is_compiled

_WRAPPERS = nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel
_OVER = "over processes of other stages too, which never come to it"
_REPLICAS = "a pipeline has its replicas itself (LayoutOptions.data_parallel)"
_SHARDS = (
    "a pipeline shares weights out by stages, and with ShardedOptimizer optimizer state and gradients over replicas"
)


def refuse_unsupported(model: nn.Module) -> None:
    """Check what a model is, and what it is made of.

    Args:
        model: As it was given to `pipeline()`, with or without weights.

    Raises:
        PipelineError: If a part of it cannot be trained in stages. It has the part's name, why, and what to do.
    """
    if hasattr(model, "_orig_mod"):
        raise PipelineError("the model is a compiled module: give the module inside; its parts may be compiled")
    if isinstance(model, torch.jit.ScriptModule):
        raise PipelineError("the model is a ScriptModule, which cannot be cut: give its original module")
    if is_compiled(model):
        raise PipelineError("the model is compiled as a whole, and cannot be cut: compile its blocks instead")
    if type(model).get_extra_state is not nn.Module.get_extra_state:
        raise PipelineError(
            f"the model ({type(model).__name__}) has a get_extra_state() of its own, and a pipeline has its own state "
            "in its place: keep that state in a buffer, or in a module within the model"
        )
    for name, module in model.named_modules():
        if (why := _why_not(module)) is not None:
            raise PipelineError(f"{f'module {name!r}' if name else 'the model'} is {why}")
    for kind, name, tensor in _iterate_tensors(model):
        if isinstance(tensor, DTensor):
            raise PipelineError(
                f"{kind} {name!r} is a DTensor, whose parts other processes have, and which are not those of its "
                "stage: give the model with plain tensors; there is no tensor parallelism within a stage"
            )
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise PipelineError(
                f"{kind} {name!r} has no shape yet, as its module is a lazy one: call the model once before "
                "pipeline(), or give the module its sizes"
            )
        if tensor.layout is torch.strided and any(
            size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise PipelineError(
                f"{kind} {name!r} of shape {tuple(tensor.shape)} was expanded: several of its elements are one in "
                "memory, and nothing can be written to it, neither by an optimizer nor from a checkpoint or another "
                "replica: make it with .clone() after expand(), or keep it small and expand it in forward"
            )
    _refuse_shared_memory(model)


def refuse_frequencies(model: nn.Module) -> None:
    """Check that no embedding divides its gradients by how often a word is in a batch.

    Args:
        model: A model whose batches are cut.

    Raises:
        PipelineError: One does. A micro-batch, or a replica, has a part of these words only.
    """
    for name, module in model.named_modules():
        learns = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.requires_grad
        if learns and module.scale_grad_by_freq:
            raise PipelineError(
                f"module {name!r} is an {type(module).__name__} with scale_grad_by_freq=True, which divides gradients "
                "by how often a word is in the batch, and a micro-batch has a part of the words only: make it with "
                "scale_grad_by_freq=False, or take microbatches=1 and one replica; PlanOptions(check=False) trains it "
                "as it is"
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse two tensors in the same memory, of which one learns: each would be trained by its own stage."""
    found: dict[int, list[tuple[Any, Any, str, bool]]] = {}
    for kind, name, tensor in _iterate_tensors(model):
        if tensor.layout is torch.strided and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((size - 1) * step for size, step in steps)
            # Of what is no block of memory only the beginning is known to be in it.
            length = extent if extent == tensor.numel() else 1
            start, size = tensor.storage_offset(), tensor.element_size()
            here = (start * size, (start + length) * size, f"{kind} {name!r}", tensor.requires_grad)
            found.setdefault(tensor.untyped_storage()._cdata, []).append(here)
    for tensors in found.values():
        for (_, end, one, learns), (start, _, other, also) in pairwise(sorted(tensors)):
            if start < end and (learns or also):
                raise PipelineError(
                    f"{one} and {other} are two tensors in the same memory, and would be two weights where they are "
                    "in two stages: tie parameters by assigning the same one (head.weight = embed.weight, not "
                    "head.weight.data = embed.weight.data), and let forward compute what a buffer takes from a "
                    "parameter"
                )


def _why_not(module: nn.Module) -> str | None:
    """Return the reason why a module cannot be a part of a stage; None if it can."""
    kind = type(module).__name__
    if isinstance(module, nn.SyncBatchNorm):
        return (
            "a SyncBatchNorm, which waits in each forward for processes of other stages, and they never come: build "
            "the model with BatchNorm1d, BatchNorm2d or BatchNorm3d, whose running statistics a pipeline puts together "
            "over all micro-batches and replicas"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "a ScriptModule (torch.jit), on which no hooks can be, by which a pipeline gives each micro-batch random "
            "numbers of its own: give the module that it was made of, which may be compiled with torch.compile"
        )
    if isinstance(module, FSDPModule):
        return f"sharded by fully_shard (FSDP2), {_OVER}: leave it out; {_SHARDS}"
    if isinstance(module, FullyShardedDataParallel):
        return f"a {kind}, {_OVER}: give the module that is in it; {_SHARDS}"
    if isinstance(module, _WRAPPERS):
        return f"a {kind}, which sums gradients of each micro-batch: give the module that is in it; {_REPLICAS}"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
        return (
            f"an {kind} with sparse=True, whose gradients have another form than all others and cannot be added up "
            "over micro-batches, owners and replicas: make it with sparse=False"
        )
    return None


def _iterate_tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer
