"""Describe how an optimizer's state lies beside a sharded parameter, where that does not follow from the parameter.

Nothing is recorded for what is sharded as its parameter is. A plain tensor with a dimension is this rank's own, and
means something beside the same elements of the parameter only: whether it is a shard, averages of rows or blocks of
quantized state cannot be told by its shape, which may be that of the shard by chance, on some ranks and not on others.
The checkpoint says that ranks have such state, because the optimizer of a fresh process, which has taken no step, does
not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.state.kinds import ANEW
from everstep.checkpoint.state.loaded import is_dtensor
from everstep.checkpoint.state.memory import get_local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

BEGIN_ANEW = f"or leave the optimizer out of restore() and {ANEW}"

# As torch shows them, in one version or another; that of FSDP2 beside tensor parallelism, and a sum that is not taken.
_STRIDED = re.compile(r"_S\((\d+), (\d+)\)|_StridedShard\(dim=(\d+), sf=(\d+)\)")
_PARTIAL = re.compile(r"P\((\w+)\)|Partial\((?:reduce_op=)?'?(\w+)'?\)")


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
    said: dict[str, Any] = {"placements": _name_placements(leaf.placements), "shape": list(leaf.shape)}
    if is_own and _parse_placements(param, said["placements"]) is None:
        raise CheckpointError(
            f"is a DTensor whose placements {tuple(leaf.placements)} nobody could give back: redistribute it to those "
            f"of its parameter, {tuple(param.placements)}"
        )
    return said


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

    placements = _parse_placements(param, said["placements"])
    if placements is None or any(each.is_partial() for each in placements):  # of a sum, each rank has its own share
        return _show_misfit(param, said)
    sizes, _ = compute_local_shape_and_global_offset(shape, param.device_mesh, placements)
    empty = torch.empty(sizes, dtype=dtype, device=get_local_tensor(param).device)
    return lay_out(param, empty, {**said, "shape": list(shape)})


def why_not_laid_out(param: DTensor, shard: Sequence[int], said: Mapping[str, Any]) -> str | None:
    """Return why a rank's own shard cannot be laid out as was said beside a parameter; None where lay_out() can."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = _parse_placements(param, said["placements"])
    if placements is None:
        return _show_misfit(param, said)
    sizes, _ = compute_local_shape_and_global_offset(tuple(said["shape"]), param.device_mesh, placements)
    if tuple(sizes) != tuple(shard):
        return f"is a shard of shape {list(shard)} in the checkpoint, and this rank's is {list(sizes)}, {BEGIN_ANEW}"
    return None


def lay_out(param: DTensor, shard: torch.Tensor, said: Mapping[str, Any]) -> DTensor:
    """Return the tensor of which this rank has a shard, on the mesh of a parameter.

    Raises:
        CheckpointError: It cannot be laid out so here.
    """
    from torch.distributed.tensor import DTensor

    shape = said["shape"]
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    placements = _parse_placements(param, said["placements"])
    if placements is None:  # by which torch means a replica
        raise CheckpointError(f"a tensor of an optimizer {_show_misfit(param, said)}")
    shard = shard.to(get_local_tensor(param).device)
    return DTensor.from_local(
        shard, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def unknown_layout() -> str:
    """Return what to say of state whose layout neither the checkpoint nor the optimizer tells."""
    return (
        "is not of its parameter's shape, was saved beside a parameter that was not sharded as this one is, and this "
        f"optimizer has taken no step that would show its shards: take one before restore(), {BEGIN_ANEW}"
    )


def _show_misfit(param: DTensor, said: Mapping[str, Any]) -> str:
    return (
        f"was laid out as {said['placements']} in the checkpoint, which does not fit a mesh of "
        f"{list(param.device_mesh.shape)}: take a step with this optimizer before restore(), which shows how it "
        f"shards its state, {BEGIN_ANEW}"
    )


def _name_placements(placements: Sequence[Placement]) -> list[list[Any]]:
    # An older version knows three kinds, and gives back no "other"; it would take a fourth for a replica.
    return [
        ["shard", getattr(each, "dim", None)]
        if _is_placement(each, "Shard")
        else ["replicate"]
        if _is_placement(each, "Replicate")
        else ["other", _show_placement(each)]
        for each in placements
    ]


def _show_placement(placement: Any) -> str:
    """Return the same text in all versions of torch, which show placements in several ways."""
    if _is_placement(placement, "_StridedShard"):
        return f"_S({placement.dim}, {placement.split_factor})"
    if _is_placement(placement, "Partial"):
        return f"P({placement.reduce_op})"
    return repr(placement)


def _is_placement(placement: Any, name: str) -> bool:
    """Tell whether a placement is of this class of torch, and of none that is derived from it."""
    import torch.distributed.tensor.placement_types as known

    return type(placement) is getattr(known, name, None)


def _parse_placements(param: DTensor, said: Sequence[Sequence[Any]]) -> list[Placement] | None:
    """Return the placements that were said, on the mesh of a parameter; None where they do not fit or are unknown."""
    own = param.placements
    if [list(each) for each in said] == _name_placements(own):
        return list(own)
    if len(said) != param.device_mesh.ndim:
        return None
    found = [_parse_placement(*each) for each in said]
    placements = [each for each in found if each is not None]
    if len(placements) != len(found) or not all(_fits_mesh(param, placements, i) for i in range(len(placements))):
        return None
    return placements


def _parse_placement(kind: str, *said: Any) -> Placement | None:
    import torch.distributed.tensor.placement_types as known

    if kind == "replicate":
        return known.Replicate()
    if kind == "shard":
        return known.Shard(said[0])
    if kind == "other" and (strided := _STRIDED.fullmatch(said[0])) and hasattr(known, "_StridedShard"):
        dim, factor = (int(each) for each in strided.groups() if each is not None)
        return known._StridedShard(dim, split_factor=factor)
    if kind == "other" and (partial := _PARTIAL.fullmatch(said[0])):
        return known.Partial(partial[1] or partial[2])
    return None


def _fits_mesh(param: DTensor, placements: Sequence[Placement], place: int) -> bool:
    """Tell whether a strided shard is cut by as many shards as the mesh has after it; else it means nothing here."""
    here: Any = placements[place]
    if not _is_placement(here, "_StridedShard"):
        return True
    after = [
        param.device_mesh.size(later)
        for later in range(place + 1, len(placements))
        if getattr(placements[later], "dim", None) == here.dim
    ]
    return bool(prod(after) == here.split_factor)


def _show_box(box: Mapping[str, Any]) -> str:
    ranges = [f"{offset}:{offset + size}" for offset, size in zip(box["offsets"], box["sizes"], strict=True)]
    return f"[{', '.join(ranges)}] of the parameter's {box['shape']}"
