"""The graph as the search sees it: blocks that are never cut, and the values between them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from everstep.pipeline.graph import Graph, GraphNode


@dataclass(frozen=True)
class Block:
    """Nodes of one stage. Seconds per micro-batch on a device of speed 1; bytes of activation per micro-batch; bytes of
    parameters without the shared ones, whose numbers are in `shared`.

    `weight_grad` is what a backward at once takes more than `input_grad`, and the least that the second part of a split
    one takes: so that bounds hold for both."""

    nodes: tuple[str, ...]
    forward: float
    input_grad: float
    weight_grad: float
    activation: int
    parameters: int
    shared: tuple[int, ...] = ()

    @property
    def work(self) -> float:
        """Return the seconds of a forward and a backward."""
        return self.forward + self.input_grad + self.weight_grad

    @property
    def is_free(self) -> bool:
        """Return whether it takes neither time nor memory."""
        return not (self.work or self.activation or self.parameters or self.shared)


@dataclass(frozen=True)
class BlockValue:
    """Bytes that flow from one block to others (ascending), and whether their gradient flows back."""

    producer: int
    consumers: tuple[int, ...]
    size: int
    gradient: bool


@dataclass(frozen=True)
class Blocks:
    """Blocks in a topological order, the values between them, the bytes of each shared parameter."""

    blocks: tuple[Block, ...]
    values: tuple[BlockValue, ...]
    shared: tuple[int, ...]

    @cached_property
    def before(self) -> list[set[int]]:
        """Return for each block the blocks whose values it uses."""
        found: list[set[int]] = [set() for _ in self.blocks]
        for value in self.values:
            for consumer in value.consumers:
                found[consumer].add(value.producer)
        return found

    @cached_property
    def after(self) -> list[set[int]]:
        """Return for each block the blocks that use its values."""
        found: list[set[int]] = [set() for _ in self.blocks]
        for value in self.values:
            found[value.producer].update(value.consumers)
        return found


def contract_graph(graph: Graph) -> Blocks:
    """Return the blocks of a graph: colocated nodes together, with all nodes on a path between them.

    A node that costs nothing stays with what its only value comes from, or goes to, where that makes no cut dearer: it
    is never a stage of its own.
    """
    merged = _UnionFind(len(graph.nodes))
    words: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        if node.colocate:
            merged.join(words.setdefault(node.colocate, index), index)
    _merge_cycles(graph, merged)
    while _merge_free_blocks(blocks := _build_blocks(graph, merged), graph, merged):
        pass
    return blocks


class _UnionFind:
    """A partition of the numbers below `count` into sets that can be joined."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, item: int) -> int:
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def join(self, first: int, second: int) -> None:
        low, high = sorted((self.find(first), self.find(second)))
        self._parent[high] = low


def _merge_cycles(graph: Graph, merged: _UnionFind) -> None:
    """Merge groups that depend on each other: strongly connected components, by Tarjan's algorithm."""
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    after: dict[int, set[int]] = {merged.find(index): set() for index in range(len(graph.nodes))}
    for index, node in enumerate(graph.nodes):
        for name in node.inputs:
            after[merged.find(position[name])].add(merged.find(index))
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    open_: set[int] = set()
    for root in after:
        if root in number:
            continue
        work = [(root, iter(after[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        open_.add(root)
        while work:
            here, rest = work[-1]
            for there in rest:
                if there not in number:
                    number[there] = low[there] = len(number)
                    stack.append(there)
                    open_.add(there)
                    work.append((there, iter(after[there])))
                    break
                if there in open_:
                    low[here] = min(low[here], number[there])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[here])
                if low[here] == number[here]:
                    while (other := stack.pop()) != here:
                        open_.discard(other)
                        merged.join(here, other)
                    open_.discard(here)


def _build_blocks(graph: Graph, merged: _UnionFind) -> Blocks:
    members: dict[int, list[int]] = {}
    for index in range(len(graph.nodes)):
        members.setdefault(merged.find(index), []).append(index)
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    before: dict[int, set[int]] = {root: set() for root in members}
    users: dict[str, set[int]] = {}
    for index, node in enumerate(graph.nodes):
        here = merged.find(index)
        for name in node.inputs:
            if (there := merged.find(position[name])) != here:
                before[here].add(there)
                users.setdefault(name, set()).add(here)
    order = {root: number for number, root in enumerate(sort_topologically(before))}
    names = {name: number for number, (name, _) in enumerate(graph.shared)}
    values = sorted(
        (
            BlockValue(
                order[merged.find(position[name])],
                tuple(sorted(order[user] for user in found)),
                graph.by_name[name].output,
                graph.by_name[name].gradient,
            )
            for name, found in users.items()
        ),
        key=lambda value: (value.producer, value.consumers),
    )
    return Blocks(
        tuple(_make_block([graph.nodes[index] for index in members[root]], names) for root in order),
        tuple(values),
        tuple(size for _, size in graph.shared),
    )


def _make_block(nodes: Sequence[GraphNode], shared: dict[str, int]) -> Block:
    return Block(
        nodes=tuple(node.name for node in nodes),
        forward=sum(node.forward for node in nodes),
        input_grad=sum(min(node.input_grad, node.backward) for node in nodes),
        weight_grad=sum(max(node.backward - node.input_grad, 0.0) for node in nodes),
        activation=sum(node.activation for node in nodes),
        parameters=sum(node.parameters for node in nodes),
        shared=tuple(sorted({shared[name] for node in nodes for name in node.ties})),
    )


def sort_topologically(before: dict[int, set[int]]) -> list[int]:
    """Return the keys, each after those in its set; among those that are ready, the lowest first."""
    after: dict[int, list[int]] = {key: [] for key in before}
    missing = {key: len(found) for key, found in before.items()}
    for key, found in before.items():
        for other in found:
            after[other].append(key)
    ready = [key for key, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        order.append(key := heapq.heappop(ready))
        for other in after[key]:
            missing[other] -= 1
            if missing[other] == 0:
                heapq.heappush(ready, other)
    return order


def _merge_free_blocks(blocks: Blocks, graph: Graph, merged: _UnionFind) -> bool:
    """Join free blocks to a neighbour, and tell whether there was one.

    With one value in and one out, of which the smaller is cut wherever either could be: moving the block to the side of
    the larger one takes the larger one's place by the smaller one's, in every stage that sends or receives it.
    """
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    incoming: list[list[BlockValue]] = [[] for _ in blocks.blocks]
    outgoing: list[list[BlockValue]] = [[] for _ in blocks.blocks]
    for value in blocks.values:
        outgoing[value.producer].append(value)
        for consumer in value.consumers:
            incoming[consumer].append(value)
    touched: set[int] = set()
    for index, block in enumerate(blocks.blocks):
        to = _find_companion(index, incoming[index], outgoing[index]) if block.is_free else None
        if to is not None and not touched & {index, to}:
            touched |= {index, to}
            merged.join(position[block.nodes[0]], position[blocks.blocks[to].nodes[0]])
    return bool(touched)


def _find_companion(index: int, incoming: Sequence[BlockValue], outgoing: Sequence[BlockValue]) -> int | None:
    if len(outgoing) > 1 or len(incoming) > 1:
        return None
    alone = bool(outgoing) and len(outgoing[0].consumers) == 1
    if not incoming:
        return outgoing[0].consumers[0] if alone else None
    source = incoming[0]
    if not outgoing or (source.consumers == (index,) and _costs_no_more(outgoing[0], source)):
        return source.producer
    return outgoing[0].consumers[0] if alone and _costs_no_more(source, outgoing[0]) else None


def _costs_no_more(first: BlockValue, second: BlockValue) -> bool:
    return first.size <= second.size and first.gradient <= second.gradient


def assign_nodes(blocks: Blocks, stages: Iterable[int]) -> dict[str, int]:
    """Return the stage of each node, from that of each block."""
    return {name: stage for block, stage in zip(blocks.blocks, stages, strict=True) for name in block.nodes}
