"""A few numbers of what a rank was given as a batch, by which ranks see that they read other samples than each other.

The process of the first stage trains on its inputs and that of the last one on its targets. Where each shuffles its
data in an order of its own, the loss is that of inputs with the targets of others, and nothing else tells.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.pipeline.engine.microbatch import Parts
from everstep.pipeline.engine.nested import tensors_of
from everstep.pipeline.errors import PipelineError

_ELEMENTS = 4096  # of a tensor, which take some 10 µs
_OFTEN = 64  # a batch on a GPU is looked at in one of so many, as the processor waits for it


@dataclass(frozen=True)
class BatchDigest:
    """Checksums of the inputs of a batch, by name, and of its targets; what a rank was not given is left out."""

    inputs: Mapping[str, int] = field(default_factory=dict)
    targets: int | None = None

    def differs(self, other: BatchDigest) -> bool:
        """Tell whether the other batch has other samples.

        Inputs may differ where targets are the same, as of images that each rank has turned and cropped by itself, and
        targets where inputs are the same. Batches of other samples differ in both.
        """
        both = self.inputs.keys() & other.inputs.keys()
        same = [all(self.inputs[name] == other.inputs[name] for name in both)] if both else []
        if self.targets is not None and other.targets is not None:
            same.append(self.targets == other.targets)
        return bool(same) and not any(same)


def digest_batch(batch: Any, targets: Any, number: int) -> BatchDigest:
    """Compute the checksums of a batch.

    Args:
        batch: The arguments of the model by name, or `Parts` of them, or what cannot be a batch.
        targets: The targets of the loss; None if there are none.
        number: The number of batches before this one; the same on all ranks.
    """
    inputs: dict[str, int] = {}
    if isinstance(batch, Mapping | Parts) and not isinstance(batch, PipelineError):
        for part in batch if isinstance(batch, Parts) else (batch,):
            for name, item in part.items():
                if (digest := _digest(item, number)) is not None:
                    inputs[name] = zlib.crc32(digest.to_bytes(4), inputs.get(name, 0))
    return BatchDigest(inputs, _digest(targets, number))


def _digest(value: Any, number: int) -> int | None:
    tensors = tensors_of(value)
    if not tensors or any(each.layout is not torch.strided or each.is_meta or each.is_quantized for each in tensors):
        return None
    if number % _OFTEN and any(each.device.type != "cpu" for each in tensors):
        return None
    digest = 0
    try:
        for tensor in tensors:
            digest = zlib.crc32(_take_elements(tensor.detach()).numpy().tobytes(), digest)
    except (RuntimeError, TypeError):  # a class of somebody's own, whose elements are not to be had so
        return None
    return digest


def _take_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of some elements, which lie in all rows and columns; of a small tensor those of all."""
    count = tensor.numel()
    step = max(1, count // _ELEMENTS)
    while math.gcd(step, count) > 1:  # else all would be of some columns, which may be the padding
        step += 1
    if tensor.is_contiguous():
        taken = tensor.view(-1)[::step]
    else:  # to make it so would copy all of it
        taken = tensor[torch.unravel_index(torch.arange(0, count, step, device=tensor.device), tensor.shape)]
    return taken.resolve_conj().resolve_neg().contiguous().view(torch.uint8).cpu()
