"""Which rank writes what: torch.distributed.checkpoint's save planner, asked once and kept.

Replicas are written once and spread over the ranks that have them, the largest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from everstep.checkpoint.collectives import gather, tell
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format import HEADER, aligned, itemsize
from everstep.checkpoint.slots import Box
from everstep.checkpoint.state.flat import fingerprint, local

Signature = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Plan:
    """One rank's share: `items[i]` goes to `boxes[i]` of its part. `sizes`: bytes of the parts of all ranks."""

    items: tuple[MetadataIndex, ...]
    boxes: tuple[Box, ...]
    sizes: tuple[int, ...]
    model: str
    signature: Signature

    def sources(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The local tensors to be copied, in the order of `boxes`; for a state whose signature is the plan's."""
        return [local(tensors[index.fqn]) for index in self.items]


def signature(tensors: Mapping[str, torch.Tensor]) -> Signature:
    """What a plan depends on: a state with another signature needs another plan."""
    return {
        name: (tensor.dtype, tensor.shape, tensor._spec if isinstance(tensor, DTensor) else None)
        for name, tensor in tensors.items()
    }


def make(state: Callable[[], Mapping[str, torch.Tensor]], rank: int, group: dist.ProcessGroup | None) -> Plan:
    """Collective over `group` (gloo; None for one process). CheckpointError, on all ranks alike, if any cannot plan;
    RankLost."""
    tensors: Mapping[str, torch.Tensor] = {}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    mine: SavePlan | str
    try:
        tensors = state()
        planner.set_up_planner(dict(tensors), None, is_coordinator=rank == 0)
        mine = _sorted(planner.create_local_plan())
        for tensor in tensors.values():
            itemsize(_dtype(tensor))
    except Exception as error:  # the others wait for this rank: it tells them instead
        mine = f"rank {rank} cannot save its state: {error}"
    plans = gather(mine, group)
    told = tell(_global(planner, plans) if rank == 0 else "", group)
    if isinstance(told, str):
        raise CheckpointError(told)
    shares, model = told
    boxes = _boxes(shares[rank], tensors)
    return Plan(
        items=tuple(item.index for item in shares[rank]),
        boxes=boxes,
        sizes=tuple(_size(share) for share in shares),
        model=model,
        signature=signature(tensors),
    )


def _global(planner: DefaultSavePlanner, plans: Sequence[SavePlan | str]) -> tuple[list[list[WriteItem]], str] | str:
    errors = [plan for plan in plans if isinstance(plan, str)]
    if errors:
        return "; ".join(errors)
    try:
        final, metadata = planner.create_global_plan([plan for plan in plans if isinstance(plan, SavePlan)])
    except Exception as error:  # the other ranks wait
        return f"the ranks' states do not fit together: {error}"
    model = fingerprint(
        (name, entry.properties.dtype, entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "properties")
    )
    return [plan.items for plan in final], model


def _sorted(plan: SavePlan) -> SavePlan:
    """Largest first, as the planner gives each replica to whoever has least; without shards that have no element."""
    items = [item for item in plan.items if item.tensor_data is not None and (_count(item) or not prod(_whole(item)))]
    return replace(plan, items=sorted(items, key=_count, reverse=True))


def _boxes(items: Sequence[WriteItem], tensors: Mapping[str, torch.Tensor]) -> tuple[Box, ...]:
    boxes = []
    offset = HEADER
    for item in items:
        dtype = _dtype(tensors[item.index.fqn])
        length = _count(item) * itemsize(dtype)
        chunk = item.tensor_data.chunk
        boxes.append(Box(item.index.fqn, dtype, _whole(item), tuple(chunk.offsets), tuple(chunk.sizes), offset, length))
        offset = aligned(offset + length)
    return tuple(boxes)


def _size(items: Sequence[WriteItem]) -> int:
    size = HEADER
    for item in items:
        size = aligned(size) + _count(item) * item.tensor_data.properties.dtype.itemsize
    return size


def _whole(item: WriteItem) -> tuple[int, ...]:
    return tuple(item.tensor_data.size)


def _count(item: WriteItem) -> int:
    return prod(item.tensor_data.chunk.sizes)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
