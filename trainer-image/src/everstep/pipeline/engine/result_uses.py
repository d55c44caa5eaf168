"""The results of the model that the losses of a step use.

A result that a loss leaves out gives the parameters behind it no gradient in one process, and an optimizer leaves them
as they are. Stages send zeros back for it, by which weight decay and momentum would change them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch

from everstep.pipeline.engine.nested import tensors_of


class HasSum(Protocol):
    """A loss with its graph."""

    sum: Any


Part = TypeVar("Part", bound=HasSum)


class ResultUses:
    """The results that the losses of a step use, and the parameters that are behind some of the results only."""

    def __init__(self) -> None:
        self._behind: list[tuple[Any, frozenset[int]]] = []
        self._used: set[int] = set()
        self.count = 0  # of the results of which it is noted; the same on all ranks

    def follow(self, behind: Mapping[str, Sequence[int]], parameters: Mapping[str, Any]) -> None:
        """Look at the losses of all steps from now on.

        Args:
            behind: By the names of parameters, the numbers of the results behind which they are; the same on all ranks.
            parameters: Those of this rank, by their names in the model.
        """
        self.count = 1 + max((number for numbers in behind.values() for number in numbers), default=-1)
        self._behind = [(parameters[name], frozenset(behind[name])) for name in behind if name in parameters]

    def begin(self) -> Self:
        """Begin a step, and return this object."""
        self._used.clear()
        return self

    def note(self, output: Any, compute: Callable[[], Part]) -> Part:
        """Compute the loss of what the model has returned, and note which results it uses."""
        if not self.count or not torch.is_grad_enabled():
            return compute()
        numbers: dict[Any, list[int]] = {}
        for number, edge in enumerate(list_edges(output)):  # before, as a loss may write what it is given
            if edge is not None:
                numbers.setdefault(edge, []).append(number)
        part = compute()
        if part.sum.requires_grad:
            self._used.update(_find_numbers(part.sum, numbers))
        return part

    def take(self) -> list[float]:
        """Return 1 for each result that was used in the step, else 0."""
        return [float(number in self._used) for number in range(self.count)]

    def drop_zeros(self, used: Sequence[float]) -> None:
        """Take gradients of zeros for none where a parameter is behind no result that a loss on any rank has used."""
        known = {number for number, times in enumerate(used) if times}
        for parameter, numbers in self._behind:
            if known.isdisjoint(numbers) and parameter.grad is not None and not bool(parameter.grad.any()):
                parameter.grad = None


def list_edges(output: Any) -> list[Any]:
    """Return of each tensor of a result the node of the graph that made it, and which of its results it is; None where
    it has no graph."""
    return [_get_edge(each) if each.requires_grad else None for each in tensors_of(output)]


def _find_numbers(loss: Any, numbers: Mapping[Any, Sequence[int]]) -> set[int]:
    """Return the numbers of the results in the graph of a loss."""
    found, seen, nodes = set[int](), set[Any](), {node for node, _ in numbers}
    waiting = [_get_edge(loss)]
    while waiting:
        edge = waiting.pop()
        found.update(numbers.get(edge, ()))
        if edge[0] not in seen and edge[0] not in nodes:
            seen.add(edge[0])
            waiting += [each for each in edge[0].next_functions if each[0] is not None]
    return found


def _get_edge(tensor: Any) -> tuple[Any, int]:
    node, number, *_ = torch.autograd.graph.get_gradient_edge(tensor)
    return node, number
