"""torch's ZeroRedundancyOptimizer: what this rank's own optimizer holds, by the names of its parameters.

Its own state_dict() is the state of all ranks as it was when they last called consolidate_state_dict(). Each parameter
is in the optimizer of one rank, so that all ranks together save what one optimizer of all parameters has: any number of
ranks takes it, and so does such an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.state.kinds import Saved
from everstep.checkpoint.state.loaded import is_instance
from everstep.checkpoint.state.optimizers import OptimizerObject
from everstep.checkpoint.state.param_holders import name_place

_CLASS = ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")


class ZeroRedundancyObject(OptimizerObject):
    """A ZeroRedundancyOptimizer, as OptimizerObject has the one within it.

    Options are those of the outer one, which a scheduler changes; the inner one gets them at its next step.
    """

    def __init__(self, prefix: str, optimizer: torch.optim.Optimizer, known: Mapping[int, str], own: str) -> None:
        inner = getattr(optimizer, "optim", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise CheckpointError(
                f"{prefix} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, whose state cannot be saved: make "
                "it without"
            )
        # A parameter of no module is known by its place among those of all ranks; the inner one has this rank's only.
        every = [each for group in optimizer.param_groups for each in group["params"]]
        self._known = {id(each): known.get(id(each), name_place(i)) for i, each in enumerate(every)}
        super().__init__(prefix, inner, self._known, own)
        self._outer = optimizer

    def leaves(self) -> Iterator[tuple[str, Any]]:
        _copy_options(self._outer, self._optimizer)
        yield from super().leaves()

    def _name_all_of_groups(self) -> list[list[str]]:
        # A rank may hold no parameter of a group, and has the options of it like all others.
        return [[self._known[id(each)] for each in group["params"]] for group in self._outer.param_groups]

    def load(self, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
        super().load(saved, tensors)
        _copy_options(self._optimizer, self._outer)


def is_zero_redundancy(optimizer: object) -> bool:
    """Tell whether an optimizer is torch's ZeroRedundancyOptimizer."""
    return is_instance(optimizer, *_CLASS)


def _copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for theirs, ours in zip(source.param_groups, target.param_groups, strict=True):
        ours.update({key: each for key, each in theirs.items() if key != "params"})
