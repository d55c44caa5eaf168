"""Tensors and their memory: which have none that could be saved, and in which several elements share one place."""

from __future__ import annotations

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined,unused-ignore]
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.manifest import DTYPES
from everstep.checkpoint.state.loaded import is_dtensor

WHOLE = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  # neither a shard of something nor a wrapper

_DTYPES = frozenset(getattr(torch, name) for name in DTYPES if hasattr(torch, name))


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank behind a tensor.

    A DTensor has none of its own, even where the whole of it is here.
    """
    return tensor.to_local() if is_dtensor(tensor) else tensor


def why_not_saved(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be saved or restored as it is, and what to do about it; None for one that can."""
    if isinstance(tensor, UninitializedTensorMixin):
        return "is a parameter of a lazy module and has no shape yet: run the module once before restore() or track()"
    if tensor.is_nested:
        return "is a nested tensor; save its parts (unbind())"
    if tensor.layout is not torch.strided:
        return "is a tensor that is sparse or has another layout than strided; make it dense (to_dense)"
    if tensor.is_quantized:
        return "is a tensor that is quantized; save its int_repr(), scale and zero point, or dequantize it"
    if tensor.dtype not in _DTYPES:
        return f"is of the type {tensor.dtype}, which no checkpoint holds; save it as another (view(torch.uint8))"
    if tensor.is_meta:
        return "is on the meta device: give it memory first (module.to_empty(device=…)), and values"
    here = get_local_tensor(tensor)
    if type(here) in WHOLE:
        if here.numel() and not here.untyped_storage().nbytes():
            return "has no memory now: whatever has freed its storage must bring it back first"
        return None
    if isinstance(here, torch._subclasses.FakeTensor):
        return "is a fake tensor and has no memory: make the object outside of FakeTensorMode"
    if is_traceable_wrapper_subclass(here) or isinstance(here, torch.masked.MaskedTensor):
        return f"is a {type(here).__name__}, which has no memory of its own and cannot be saved; unwrap it"
    return None


def is_of_own_class(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of a class that no checkpoint records: what is restored anew is a plain tensor.

    A parameter of such a class is not meant: whoever trains it holds it when it is restored.
    """
    here = get_local_tensor(tensor)
    return type(here) not in WHOLE and not isinstance(here, torch.nn.Parameter)


def why_not_written(tensor: torch.Tensor) -> str | None:
    """Return why nothing may be copied into a tensor now, and what to do about it; None where it may."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return (
            "was made within torch.inference_mode(), and can only be written into within it: restore there, or make "
            "the object outside of it"
        )
    return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether several elements may share one place in memory, as those of an expanded tensor do."""
    if tensor.is_contiguous() or type(tensor) not in WHOLE or not tensor.numel():
        return False
    reach = 0
    # Non-overlapping where each step is beyond all that the smaller steps together reach.
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def fill_overlapping(live: torch.Tensor, loaded: torch.Tensor, name: str) -> None:
    """Give a tensor whose elements share memory its values.

    CheckpointError, with nothing touched, when elements that share a place here have different values in the
    checkpoint.
    """
    live, small = live.detach(), loaded.to(live.device)
    for dim, stride in enumerate(live.stride()):
        if stride == 0:  # expanded: without it, an index for each element could be many times the memory
            small = small.narrow(dim, 0, 1)
    shape, strides = tuple(small.shape), live.stride()
    reach = 1 + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    memory = live.as_strided((reach,), (1,))
    filled = memory.clone()
    places = torch.arange(reach, device=live.device).as_strided(shape, strides).reshape(-1)
    filled[places] = small.reshape(-1)
    if not have_same_bits(filled.as_strided(shape, strides).expand(live.shape), loaded.to(live.device)):
        raise CheckpointError(
            f"{name}: elements that share memory here have different values in the checkpoint; give it memory of its "
            "own before restore() (clone it)"
        )
    memory.copy_(filled)


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor that lies in one piece, in its own memory.

    A tensor of one element lies so whatever its stride is, and torch views none but those of stride 1 as bytes.
    """
    flat = tensor.detach().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors on one device have the same bytes: a NaN is its bits here."""
    return bool(torch.equal(*(view_bytes(each.contiguous()) for each in (one, other))))
