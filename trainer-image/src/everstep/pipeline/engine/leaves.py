"""Tensors that learn and that no stage has: their gradients would be added up here, and reach no other process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from everstep.pipeline.errors import PipelineError


class UnknownLeaves:
    """Looks at the graphs of a stage's first two micro-batches for leaves that are neither its parameters nor what it
    was given. A leaf that is in both was there before; one that a forward makes itself is another in each."""

    def __init__(self, stage: int, parameters: Iterable[torch.Tensor]) -> None:
        self._stage, self._known = stage, {id(each) for each in parameters}
        self._before: list[Any] | None = None
        self._is_done = False

    def look(self, results: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> None:
        """Look at the graph of these results.

        Raises:
            PipelineError: If a tensor learns in it that is no parameter of the stage.
        """
        if self._is_done:
            return
        known = self._known | {id(each) for each in given}
        found = [each for each in _list_leaves(results) if id(each) not in known]
        before, self._before = self._before, found
        if before is None:
            return
        self._is_done, self._before = True, None
        for leaf in found:
            if any(leaf is each for each in before):
                raise PipelineError(
                    f"a tensor of shape {tuple(leaf.shape)} requires gradients in stage {self._stage}, and is no "
                    "parameter of a module in it: its gradient would be a sum that no other process has. Register it "
                    "as a parameter of the module that uses it (nn.ParameterList for lists; a loss that learns is a "
                    "part of the model), or detach it"
                )


def _list_leaves(results: Iterable[torch.Tensor]) -> list[Any]:
    """The leaves in the graph of these tensors."""
    found, seen = list[Any](), set[Any]()
    stack: list[Any] = [each.grad_fn for each in results if each.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)
        stack.extend(child for child, _ in node.next_functions if child is not None)
    return found
