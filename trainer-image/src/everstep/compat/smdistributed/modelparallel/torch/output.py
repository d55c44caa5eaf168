"""What a step function returns: all micro-batches' versions of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from everstep.compat.smdistributed.modelparallel.torch.refused import Refused


class StepOutput:
    """The versions of one tensor, of each micro-batch in order, in `outputs`."""

    merge = Refused("StepOutput.merge")
    accumulate = Refused("StepOutput.accumulate")

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
        """The mean over micro-batches, of the same shape."""
        return self.stack().mean(0) if self._outputs[0].is_floating_point() else self.stack().float().mean(0)

    def reduce_sum(self) -> Any:
        return self.stack().sum(0)

    def concat(self) -> Any:
        """Along the first dimension."""
        return torch.cat(self._outputs)

    def stack(self) -> Any:
        """With the micro-batches as a new first dimension."""
        return torch.stack(self._outputs)


def gathered(returned: Sequence[Any]) -> Any:
    """What the step function returned, with a StepOutput for each tensor; of anything else, the first micro-batch's."""
    leaves = [pytree.tree_flatten(each)[0] for each in returned]
    structure = pytree.tree_flatten(returned[0])[1]
    found = [StepOutput(each) if isinstance(each[0], torch.Tensor) else each[0] for each in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(found, structure)
