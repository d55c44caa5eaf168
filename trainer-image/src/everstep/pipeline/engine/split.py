"""A backward in two parts: the gradients of a stage's inputs now, those of its parameters later.

What zero-bubble schedules (arXiv 2401.10241) need, on public autograd API only. Of the graph under a stage's results
let the trunk be the nodes from which an input can be reached. The first part runs the trunk, and keeps what came in at
each node that has a branch: an edge to a node outside the trunk, which leads to parameters only. The second part runs
the branches. Each native node computes each of its gradients once, since autograd asks it only for those that lie on
the way. Where asking for one branch would draw in the trunk again, or another branch, as when a parameter is used twice
and one use lies above the other, the gradients of the parameters under it are taken in the first part. So are those
under a function that is written in Python, or compiled: it computes all of its gradients whenever it is asked for one,
and may do more than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

Gradients = list[Any]  # a tensor or None for each
Edge = tuple[Any, int]  # a node, and which of its results a gradient is for
Graph = dict[Any, list[Edge]]


@dataclass(frozen=True)
class _Branch:
    """Edges of a node of the trunk that lead to parameters only, and what came in at that node."""

    node: Any
    edges: list[Any]
    came: Gradients

    def gradients(self) -> Gradients:
        """Return the gradients of the edges; None for an edge without one."""
        known = [
            (GradientEdge(self.node, index), gradient)
            for index, gradient in enumerate(self.came)
            if gradient is not None
        ]
        edges, gradients = [edge for edge, _ in known], [gradient for _, gradient in known]
        return list(torch.autograd.grad(edges, self.edges, gradients, allow_unused=True))


@dataclass
class Deferred:
    """The rest of a backward: run it once, then drop it, since it keeps the graph of the forward alive."""

    roots: list[Any] = field(default_factory=list)  # edges whose gradient is known, and which lead to parameters only
    gradients: Gradients = field(default_factory=list)
    branches: list[list[_Branch]] = field(default_factory=list)  # those with a node in common are together

    @property
    def nodes(self) -> Iterator[Any]:
        """Return the nodes at which the backward begins to go to parameters."""
        branches = (branch.edges for together in self.branches for branch in together)
        return (edge.node for edges in (self.roots, *branches) for edge in edges)

    def weight_grad(self) -> None:
        """Add the gradients of the parameters to theirs."""
        # One after the other, so that a gradient's memory is there again for the next one; what else leads to
        # parameters may have nodes in common with all of them.
        apart = not self.roots
        for together in self.branches:
            for branch in together:
                for edge, gradient in zip(branch.edges, branch.gradients(), strict=True):
                    if gradient is not None:
                        self.roots.append(edge)
                        self.gradients.append(gradient)
            if apart:
                self._accumulate()
        self.branches = []
        self._accumulate()

    def _accumulate(self) -> None:
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients)
        self.roots, self.gradients = [], []


def input_grad(roots: Sequence[Any], gradients: Gradients, inputs: Sequence[Any]) -> tuple[Gradients, Deferred]:
    """The gradients of `inputs`, leaves that require one, and what is left for the parameters.

    `roots` require gradients, which are `gradients`; None for an input that none of them depends on.
    """
    edges = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
    first, branches, early = _survey_graph([(edge.node, edge.output_nr) for edge in edges], inputs)
    deferred = Deferred()
    through, coming = list[Any](), list[Any]()
    for edge, gradient in zip(edges, gradients, strict=True):
        is_first = edge.node in first
        (through if is_first else deferred.roots).append(edge)
        (coming if is_first else deferred.gradients).append(gradient)
    if not through:
        return [None] * len(inputs), deferred
    came: dict[Any, Gradients] = {}

    def keep(node: Any) -> Callable[[tuple[Any, ...]], None]:
        return lambda incoming: came.__setitem__(node, list(incoming))

    hooks = [node.register_prehook(keep(node)) for together in branches for node in together]
    try:
        found = torch.autograd.grad(through, [*inputs, *early], coming, retain_graph=bool(branches), allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for edge, gradient in zip(early, found[len(inputs) :], strict=True):
        if gradient is not None:
            deferred.roots.append(edge)
            deferred.gradients.append(gradient)
    deferred.branches = [
        [_Branch(node, edges, came[node]) for node, edges in together.items() if node in came] for together in branches
    ]
    return list(found[: len(inputs)]), deferred


def _survey_graph(
    roots: Sequence[Edge], inputs: Sequence[Any]
) -> tuple[set[Any], list[dict[Any, list[Any]]], list[Any]]:
    """Return the nodes that the first part begins at or passes, the branches that can wait, by their node, those
    together that have one in common, and the edges that cannot wait."""
    order = _order_graph([node for node, _ in roots])
    ends = {torch.autograd.graph.get_gradient_edge(leaf).node for leaf in inputs}
    trunk = set(ends)
    for node, children in order.items():
        if any(child in trunk for child, _ in children):
            trunk.add(node)
    starts: dict[Edge, list[Any]] = {}
    for node, children in order.items():
        if node in trunk and node not in ends:
            for edge in children:
                if edge[0] not in trunk and node not in starts.setdefault(edge, []):
                    starts[edge].append(node)
    for edge in roots:
        if edge[0] not in trunk:
            starts.setdefault(edge, [])  # it begins at no node, but may have some in common with the branches
    # Autograd goes to a node by all ways, whichever of its results it is asked for.
    starts_of: dict[Any, list[Any]] = defaultdict(list)
    for (child, _), nodes in starts.items():
        starts_of[child] += nodes
    first = set(trunk)
    # The graph of compiled code cannot be kept for another part.
    compiled = any(type(node).__name__ == "CompiledFunctionBackward" for node in order)
    home: dict[Any, dict[Any, list[Any]]] = {}
    early: dict[Any, Any] = {}
    for edges, under in _group_branches(starts, order):
        tops = {child for child, _ in edges}
        nested = any(edge[0] in under for edge in edges if starts[edge])
        is_python = any(isinstance(node, BackwardCFunction) for edge in edges for node in starts[edge])
        if compiled or nested or is_python or any(_one_above_another(starts_of[top], order, trunk) for top in tops):
            early.update((node, GradientEdge(node, 0)) for node in (*under, *tops) if not order[node])
            first |= tops
        else:
            together: dict[Any, list[Any]] = {}
            for node, way in [(node, edge) for edge in edges for node in starts[edge]]:
                if node in home and home[node] is not together:
                    for other, known in home[node].items():
                        together.setdefault(other, []).extend(known)
                        home[other] = together
                together.setdefault(node, []).append(GradientEdge(*way))
                home[node] = together
    return first, list({id(each): each for each in home.values()}.values()), list(early.values())


def _group_branches(branches: Iterable[Edge], order: Graph) -> list[tuple[list[Edge], set[Any]]]:
    """The edges of branches that have nodes in common, and the nodes strictly under them."""
    found: list[tuple[list[Edge], set[Any]]] = []
    owner: dict[Any, tuple[list[Edge], set[Any]]] = {}
    for edge in branches:
        under = _collect_descendants(edge[0], order)
        mine: tuple[list[Edge], set[Any]] = ([edge], under)
        for other in {id(owner[node]): owner[node] for node in (edge[0], *under) if node in owner}.values():
            mine = (other[0] + mine[0], other[1] | mine[1])
            found.remove(other)
        found.append(mine)
        owner.update(dict.fromkeys((*mine[1], *(child for child, _ in mine[0])), mine))
    return found


def _collect_descendants(top: Any, order: Graph) -> set[Any]:
    seen: set[Any] = set()
    stack = [child for child, _ in order[top]]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(child for child, _ in order[node])
    return seen


def _order_graph(tops: Sequence[Any]) -> Graph:
    """Every node with its edges, after all that it leads to."""
    found: Graph = {}
    seen: set[Any] = set()
    stack: list[tuple[Any, list[Edge] | None]] = [(top, None) for top in tops]
    while stack:
        node, children = stack.pop()
        if children is not None:
            found[node] = children
        elif node not in seen:
            seen.add(node)
            children = [(child, index) for child, index in node.next_functions if child is not None]
            stack.append((node, children))
            stack.extend((child, None) for child, _ in children if child not in seen)
    return found


def _one_above_another(starts: Sequence[Any], order: Graph, trunk: set[Any]) -> bool:
    if len(starts) < 2:
        return False
    for start in starts:
        seen: set[Any] = set()
        stack = [child for child, _ in order[start] if child in trunk]
        while stack:
            node = stack.pop()
            if node not in seen:
                if node in starts:
                    return True
                seen.add(node)
                stack.extend(child for child, _ in order[node] if child in trunk)
    return False
