"""The output of a step function: all micro-batches' versions of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from everstep.compat.smdistributed.modelparallel.torch.refused import NotOfferedName


class StepOutput:
    """A tensor's versions, one of each micro-batch in order, in `outputs`."""

    merge = NotOfferedName("StepOutput.merge")
    accumulate = NotOfferedName("StepOutput.accumulate")

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._outputs = list(outputs)

    @property
    def outputs(self) -> list[Any]:
        return list(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __getitem__(self, microbatch: int) -> Any:
        return self._outputs[microbatch]

    def reduce_mean(self) -> Any:
        """Return the mean over micro-batches, of the same shape."""
        return self.stack().mean(0) if self._outputs[0].is_floating_point() else self.stack().float().mean(0)

    def reduce_sum(self) -> Any:
        return self.stack().sum(0)

    def concat(self) -> Any:
        """Concatenate the micro-batches along the first dimension."""
        return torch.cat(self._outputs)

    def detach(self) -> StepOutput:
        """Return the same without the graph."""
        return StepOutput([each.detach() for each in self._outputs])

    def stack(self) -> Any:
        """Stack the micro-batches along a new first dimension."""
        return torch.stack(self._outputs)


def gather_outputs(returned: Sequence[Any]) -> Any:
    """Return what the step function returned, with a StepOutput in the place of each tensor, and a list of all
    micro-batches' in that of anything else, but of None.

    Raises:
        ValueError: It returned other structures for other micro-batches.
    """
    leaves, structures = zip(*(pytree.tree_flatten(each) for each in returned), strict=True)
    if any(each != structures[0] for each in structures):
        raise ValueError("the step function must return the same structure for each micro-batch")
    return pytree.tree_unflatten([_combine_versions(each) for each in zip(*leaves, strict=True)], structures[0])


def _combine_versions(versions: Sequence[Any]) -> Any:
    if isinstance(versions[0], torch.Tensor):
        return StepOutput(versions)
    return None if all(each is None for each in versions) else list(versions)
