"""What each node of a model costs: measured on the device that will run it, or counted where nothing can run.

A node is measured by itself, on the values that the nodes before it gave for a real batch. Statistics of the model and
random numbers are afterwards what they were.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median, quantiles
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from everstep.pipeline.graph import Device, Graph, Node, Profile

INPUT = "input:"
OUTPUT = "output"


class NodeModule(Protocol):
    """A node as a stage of its own."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: nn.Module

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]: ...


Timer = Callable[[Callable[[], Any]], tuple[Any, float]]  # (result, seconds)


@dataclass
class Cost:
    """Seconds of each run; bytes kept for backward, and of each value."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    input_grad: list[float] = field(default_factory=list)
    activation: int = 0
    sizes: dict[str, int] = field(default_factory=dict)


def measure(
    graph: Graph,
    nodes: Mapping[str, NodeModule],
    inputs: Mapping[str, Any],
    *,
    device: Any = "cpu",
    repeats: int = 7,
    warmup: int = 2,
    wait: Callable[[], object] = lambda: None,
) -> Profile:
    """The graph with medians of `repeats` times and with bytes, for micro-batches like `inputs`, on `device`.

    A node's weights are lent to the device while it is measured; what is on the meta device gets random numbers.
    `wait` is called before each node: a barrier of all ranks makes each measure while the others are busy too.
    """
    target = torch.device(device)
    timer = _clock(target)
    costs = _all_costs(graph, nodes, inputs, target, repeats, warmup, timer, wait)
    name = torch.cuda.get_device_name(target) if target.type == "cuda" else target.type
    memory = torch.cuda.get_device_properties(target).total_memory if target.type == "cuda" else None
    return profile_of(graph, costs, inputs, name, memory)


def _all_costs(
    graph: Graph,
    nodes: Mapping[str, NodeModule],
    inputs: Mapping[str, Any],
    device: Any,
    repeats: int,
    warmup: int,
    timer: Timer,
    wait: Callable[[], object],
) -> dict[str, Cost]:
    values = {INPUT + name: _to(value, device) for name, value in inputs.items()}
    last = {name: node for node, module in nodes.items() for name in module.inputs}
    kept: set[int] = set()  # memory that an earlier node keeps for its backward
    costs = {}
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        for node in graph.nodes:
            if node.name not in nodes:
                continue
            module = nodes[node.name]
            wait()
            with lent(module.module, device):
                made, costs[node.name] = cost_of(module, values, kept, repeats, warmup, timer)
            values |= made
            for name in module.inputs:
                if last[name] == node.name and not name.startswith(INPUT):
                    del values[name]
    return costs


def cost_of(
    module: NodeModule, values: Mapping[str, Any], kept: set[int], repeats: int, warmup: int, timer: Timer
) -> tuple[dict[str, Any], Cost]:
    """The values of a node, without their graph, and what it took; `kept`: memory that earlier nodes keep."""
    cost = Cost()
    weights = [parameter for parameter in module.module.parameters() if parameter.requires_grad]
    cost.activation, found = _activation(module, values, kept)
    cost.sizes = {name: sum(map(_bytes, _tensors(value))) for name, value in found.items() if name != OUTPUT}
    for attempt in range(warmup + repeats):
        given = {name: _copy(values[name]) for name in module.inputs}
        asked = [leaf for leaf in _tensors(given) if leaf.requires_grad]
        with torch.enable_grad():
            made, forward = timer(partial(module, given))
        results = [leaf for leaf in _tensors(made) if leaf.requires_grad]
        backward = [torch.ones_like(result) for result in results]
        full = ahead = 0.0
        if results and asked and weights:
            _, ahead = timer(partial(_input_grad, results, asked, backward))
        if results and (asked or weights):
            # Added to the gradients of the run before, as a micro-batch's are.
            _, full = timer(partial(torch.autograd.backward, results, backward, inputs=asked + weights))
        if attempt >= warmup:
            cost.forward.append(forward)
            cost.input_grad.append(ahead if weights else full)
            cost.backward.append(full)
        del made, results
    return found, cost


def _input_grad(results: Sequence[Any], asked: Sequence[Any], backward: Sequence[Any]) -> Any:
    return torch.autograd.grad(results, asked, backward, retain_graph=True, allow_unused=True)


def profile_of(
    graph: Graph, costs: Mapping[str, Cost], inputs: Mapping[str, Any], device: str, memory: int | None = None
) -> Profile:
    """The graph with the costs of its nodes; what has none is a part of the value of the node before it."""
    nodes, spread = list[Node](), dict[str, float]()
    sizes = {name: size for cost in costs.values() for name, size in cost.sizes.items()}
    for node in graph.nodes:
        cost = costs.get(node.name)
        if cost is None:
            nodes.append(replace(node, output=sizes.get(node.name, node.output)))
            continue
        given, full = median(cost.input_grad), median(cost.backward)
        nodes.append(
            replace(
                node,
                forward=median(cost.forward),
                input_grad=min(given, full),
                weight_grad=max(full - given, 0.0),
                activation=cost.activation,
                output=sizes.get(node.name, 0),
            )
        )
        spread[node.name] = _spread([a + b for a, b in zip(cost.forward, cost.backward, strict=True)])
    samples = next((len(leaf) for leaf in _tensors(dict(inputs)) if leaf.dim()), 1)
    return Profile(Graph(tuple(nodes), graph.shared), (Device(1.0, memory),), (), samples, spread, device)


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2 or not median(times):
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / 2 / median(times)


def _clock(device: Any) -> Timer:
    def wall(work: Callable[[], Any]) -> tuple[Any, float]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result, time.perf_counter() - start

    return wall


# ---- what is kept for backward ----


def _activation(module: NodeModule, values: Mapping[str, Any], kept: set[int]) -> tuple[int, dict[str, Any]]:
    """Bytes that the graph of a forward keeps, without weights; and its values. What earlier nodes keep already, `kept`
    by memory, counts with them: so the node gets their values themselves, if it does not change them in place."""
    alive = {_memory(leaf) for value in values.values() for leaf in _tensors(value)}
    kept.intersection_update(alive)  # memory that no value has any more can be another's by now
    given = {name: values[name] for name in module.inputs}
    for attempt in (given, {name: _copy(value) for name, value in given.items()}):
        saved = _Saved(module.module)
        try:
            with torch.enable_grad(), saved:
                made = module(attempt)
            break
        except RuntimeError:
            if attempt is not given:
                raise
    total = sum(size for memory, size in saved.sizes.items() if memory not in kept)
    made = {name: pytree.tree_map(_no_graph, value) for name, value in made.items()}
    alive.update(_memory(leaf) for value in made.values() for leaf in _tensors(value))
    kept.update(saved.sizes.keys() & alive)
    return total, made


class _Saved(torch.autograd.graph.saved_tensors_hooks):  # type: ignore[misc]  # torch is not where types are checked
    """The memory that a graph keeps, and the bytes of each."""

    def __init__(self, module: nn.Module) -> None:
        own = {_memory(each) for each in (*module.parameters(), *module.buffers())}
        self.sizes: dict[int, int] = {}
        self._hold: list[Any] = []  # memory that is given back while the forward runs could come again

        def pack(tensor: Any) -> Any:
            tensor = tensor.detach()  # a graph that holds its own results is never freed
            if _memory(tensor) not in own:
                self.sizes[_memory(tensor)] = int(tensor.untyped_storage().nbytes())
                self._hold.append(tensor)
            return tensor

        super().__init__(pack, lambda tensor: tensor)


# ---- tensors ----


@contextlib.contextmanager
def lent(module: nn.Module, device: Any) -> Iterator[None]:
    """While inside, all weights are on the device; those without data are random numbers there."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    copies: dict[int, Any] = {}
    for each in module.modules():
        for held in (each._parameters, each._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    before.append((held, name, tensor))
                    if id(tensor) not in copies:
                        copies[id(tensor)] = _on(tensor, device, isinstance(tensor, nn.Parameter))
    try:
        for held, name, tensor in before:
            held[name] = copies[id(tensor)]
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


def _on(tensor: Any, device: Any, parameter: bool) -> Any:
    if tensor.device.type == "meta":
        data = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if data.is_floating_point():
            data.normal_(std=0.02)
    else:
        # A copy: the statistics of a batch are not to be those of a measurement.
        data = tensor.detach().to(device, copy=not parameter)
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if parameter else data


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _to(value: Any, device: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def _no_graph(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _copy(value: Any) -> Any:
    """With memory of its own, and no leaf where there is a gradient: the node may change it in place."""

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    with torch.enable_grad():
        return pytree.tree_map(copy, value)


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
