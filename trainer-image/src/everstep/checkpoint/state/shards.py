"""How an optimizer's state lies beside a sharded parameter, where that does not follow from the parameter.

What is sharded as its parameter is needs no word. A plain tensor with a dimension is this rank's own, and means
something beside the same elements of the parameter only: whether it is a shard, averages of rows or blocks of quantized
state cannot be told by its shape, which may be that of the shard by chance, on some ranks and not on others. The
checkpoint says that ranks have such state, because the optimizer of a fresh process, which has taken no step, does not
know.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from everstep.checkpoint.state.loaded import is_dtensor
from everstep.checkpoint.state.memory import local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

BEGIN_ANEW = "or leave the optimizer out of restore() and name it in track() to begin with a new one"


def describe_leaf(param: torch.Tensor, leaf: torch.Tensor, *, is_own: bool) -> dict[str, Any] | None:
    """Return how a tensor of state lies, as a checkpoint says it; None where its parameter or its shape tells.

    Args:
        param: Its parameter.
        leaf: The tensor.
        is_own: Whether each rank saves all that it has for itself: then shards need a word, too.
    """
    if not is_dtensor(param) or not is_dtensor(leaf):
        return None
    if leaf.shape == param.shape and leaf.placements == param.placements and not is_own:
        return None
    return {"placements": _name_placements(leaf), "shape": list(leaf.shape)}


def describe_box(param: torch.Tensor) -> dict[str, Any]:
    """Return which elements of a parameter this rank has."""
    if not is_dtensor(param):
        return {"shape": list(param.shape), "offsets": [0] * param.dim(), "sizes": list(param.shape)}
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return {"shape": list(param.shape), "offsets": list(offsets), "sizes": list(sizes)}


def why_elsewhere(param: torch.Tensor, saved: Mapping[str, Any] | None) -> str | None:
    """Return why what was a rank's own cannot come back beside a parameter; None where the rank has the same shard."""
    here = describe_box(param)
    if here == saved:
        return None
    then = "not saved by a rank of this number" if saved is None else f"saved beside {_show_box(saved)}"
    return (
        "is state that each rank keeps for its own shard: a tensor of some size that is no DTensor. It was "
        f"{then}, and this rank has {_show_box(here)}: restore on as many ranks with the parameters sharded as they "
        f"were, {BEGIN_ANEW}"
    )


def as_shard(param: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of the shape of this rank's shard as what it is a shard of, in the same memory."""
    if not is_dtensor(param) or is_dtensor(plain):
        return plain
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(plain, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def make_leaf(param: DTensor, shape: tuple[int, ...], dtype: torch.dtype, said: Mapping[str, Any]) -> DTensor | str:
    """Return a sharded tensor of state for a parameter, empty and laid out as was said, or why that cannot be here."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = param.device_mesh, _parse_placements(said["placements"])
    if placements is None or len(placements) != mesh.ndim:
        return (
            f"was laid out as {said['placements']} in the checkpoint, which does not fit a mesh of "
            f"{list(mesh.shape)}: take a step with this optimizer before restore(), which shows how it shards its "
            f"state, {BEGIN_ANEW}"
        )
    sizes, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    empty = torch.empty(sizes, dtype=dtype, device=local(param).device)
    return lay_out(param, empty, {**said, "shape": list(shape)})


def lay_out(param: DTensor, shard: torch.Tensor, said: Mapping[str, Any]) -> DTensor:
    """Return the tensor of which this rank has a shard, on the mesh of a parameter."""
    from torch.distributed.tensor import DTensor

    shape = said["shape"]
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    placements = _parse_placements(said["placements"])
    shard = shard.to(local(param).device)
    return DTensor.from_local(
        shard, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def unknown_layout() -> str:
    """Return what to say of state whose layout neither the checkpoint nor the optimizer tells."""
    return (
        "is not of its parameter's shape, was saved beside a parameter that was not sharded as this one is, and this "
        f"optimizer has taken no step that would show its shards: take one before restore(), {BEGIN_ANEW}"
    )


def _name_placements(tensor: DTensor) -> list[list[Any]]:
    from torch.distributed.tensor import Replicate, Shard

    return [
        ["shard", each.dim]
        if type(each) is Shard
        else ["replicate"]
        if type(each) is Replicate
        else ["other", str(each)]
        for each in tensor.placements
    ]


def _parse_placements(said: list[list[Any]]) -> list[Placement] | None:
    from torch.distributed.tensor import Replicate, Shard

    if any(kind == "other" for kind, *_ in said):
        return None
    return [Shard(*dims) if kind == "shard" else Replicate() for kind, *dims in said]


def _show_box(box: Mapping[str, Any]) -> str:
    ranges = [f"{offset}:{offset + size}" for offset, size in zip(box["offsets"], box["sizes"], strict=True)]
    return f"[{', '.join(ranges)}] of the parameter's {box['shape']}"
