"""Large arrays and bytes: saved beside the tensors, where 200 MB cost what 200 MB cost, and not as text in a manifest.

The tensor of their name has the bytes; the value of the same name says what they are (see values.InPart).
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from everstep.checkpoint.format.values import InPart, describe_array, is_plain_array

LARGEST_IN_MANIFEST = 1024  # bytes of an array or of bytes

# In the byte order of this machine; other dtypes go as bytes.
_NATIVE = {"?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"}


def is_bulk(value: Any) -> bool:
    """Tell whether a value is an array or bytes of some size."""
    if isinstance(value, bytes | bytearray):
        return type(value) in (bytes, bytearray) and len(value) > LARGEST_IN_MANIFEST
    numpy = sys.modules.get("numpy")  # nobody holds an array of a library that is not loaded
    return (
        numpy is not None
        and type(value) is numpy.ndarray
        and value.nbytes > LARGEST_IN_MANIFEST
        and is_plain_array(value)
    )


def is_leaf(value: object) -> bool:
    """Tell whether a value has a name of its own in a checkpoint, wherever in a nested state it is."""
    return isinstance(value, torch.Tensor) or is_bulk(value)


def to_tensor(value: Any) -> tuple[torch.Tensor, InPart]:
    """Return a tensor with the value's bytes, in its memory where that is possible, and what they are."""
    if isinstance(value, bytes | bytearray):
        return _from_buffer(value), InPart(type(value).__name__)
    described = describe_array(value)
    whole = value.T if described.order == "F" else value
    if not whole.flags.c_contiguous:
        whole = whole.copy(order="C")
    if value.dtype.isnative and value.dtype.str.lstrip("<>=|") in _NATIVE:
        return _wrap_array(whole), described
    return _from_buffer(whole.reshape(-1).view("u1") if whole.dtype.itemsize else b""), described


def from_tensor(tensor: torch.Tensor, described: InPart) -> Any:
    """Return the value whose bytes a tensor has; an array shares its memory."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return described.restore(data)


def stand_in(tensor: torch.Tensor, described: InPart) -> torch.Tensor:
    """Return what tells an array's shape and type without its bytes: the tensor on the meta device that has them.

    An array whose type torch does not have, and bytes, have that of their bytes.
    """
    dims = range(tensor.dim())
    return tensor.to("meta").permute(*(reversed(dims) if described.order == "F" else dims))


def _from_buffer(data: Any) -> torch.Tensor:
    import numpy

    return _wrap_array(numpy.frombuffer(data, numpy.uint8))


def _wrap_array(array: Any) -> torch.Tensor:
    with warnings.catch_warnings():  # of memory that may not be written to: it is only read
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)
