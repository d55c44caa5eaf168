"""Measure the cost of each node of a model on the device that will run it, or count it where nothing can run.

Nodes run one after the other, forwards first and then backwards, as in a stage: what a node needs was just made, and
its weights were not just used. They get the values that the nodes before gave for a real batch. Statistics of the model
and random numbers are afterwards what they were.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from everstep.pipeline.engine.stage import INPUT, OUTPUT, RunnableStage
from everstep.pipeline.graph import Device, Graph, GraphNode, Profile
from everstep.pipeline.profile_runs import Cost, copy_of, make_timer, of_nothing, run_microbatches, tensors_in
from everstep.pipeline.transport.devices import with_index

TOGETHER = 1 << 30  # bytes of weights, gradients and activations that are on the device to be measured
EACH = 3  # nodes of those that do the same work that are timed


def measure_graph(
    graph: Graph,
    nodes: Mapping[str, RunnableStage],
    inputs: Mapping[str, Any],
    *,
    device: Any = "cpu",
    groups: Sequence[Sequence[str]] = (),
    repeats: int = 7,
    warmup: int = 2,
    seconds: float = math.inf,
    agree: Callable[[bool], bool] = bool,
) -> Profile:
    """Measure the nodes of a graph, with values that they have for a real batch.

    Nodes are measured together as far as `TOGETHER` allows; their weights are lent to the device meanwhile, and what is
    on the meta device gets random numbers.

    Args:
        graph: Of the model.
        nodes: Each node as a stage; those of the graph that are missing cost nothing.
        inputs: Of a micro-batch, by the names of the model's arguments.
        device: Where they run.
        groups: Nodes that do the same work, as `group_alike_nodes` finds them. Of each, `EACH` are timed, and stand
            for all.
        repeats: Times of each, of which the medians count.
        warmup: Runs before them, which do not.
        seconds: For repeats of nodes that are measured together; some are made however long it takes.
        agree: Whether one rank says so, by what this one says. It is called before each repeat: where all ranks wait in
            it for each other, each measures while the others are busy too.

    Returns:
        The graph with times and bytes.
    """
    target = with_index(device)
    timer = make_timer(target)
    nothing = of_nothing(target, timer)
    values = {INPUT + name: _move_value(value, target) for name, value in inputs.items()}
    last = {name: node for node, module in nodes.items() for name in module.inputs}
    kept: set[int] = set()  # memory that an earlier node keeps for its backward
    costs: dict[str, Cost] = {}
    named = [node.name for node in graph.nodes if node.name in nodes]
    timed = {name: _choose_sample([each for each in group if each in nodes]) for group in groups for name in group}
    chosen = {each for some in timed.values() for each in some}
    window, size = dict[str, RunnableStage](), 0
    with torch.random.fork_rng([target.index] if target.type == "cuda" else []):
        for name in named:
            window[name] = module = nodes[name]
            with lend_weights(module.module, target):
                made, costs[name] = look_at(module, values, kept)
            torch.clear_autocast_cache()  # else the copies of all weights are there until all is measured
            values |= made
            size += 2 * sum(map(_count_bytes, module.module.parameters())) + costs[name].activation
            if size > TOGETHER or name == named[-1]:
                running = {each: node for each, node in window.items() if each in chosen or each not in timed}
                with contextlib.ExitStack() as stack:
                    for node in running.values():
                        stack.enter_context(lend_weights(node.module, target))
                    run_microbatches(
                        running, values, costs, timer, repeats=repeats, warmup=warmup, seconds=seconds, agree=agree
                    )
                torch.clear_autocast_cache()
                done = {each for module in window.values() for each in module.inputs if last[each] in window}
                values = {each: value for each, value in values.items() if each not in done}
                window, size = {}, 0
    for cost in costs.values():
        cost.less(nothing)
    for name, some in timed.items():
        if name not in chosen:
            costs[name].take([costs[each] for each in some])
    gpu = torch.cuda.get_device_properties(target) if target.type == "cuda" else None
    return profile_of(graph, costs, inputs, gpu.name if gpu else target.type, gpu.total_memory if gpu else None)


def _choose_sample(group: Sequence[str]) -> Sequence[str]:
    """The first, the last, and as many between them as are timed."""
    if len(group) <= EACH:
        return group
    return [group[index * (len(group) - 1) // (EACH - 1)] for index in range(EACH)]


class WithLoss:
    """A node that gives what the model returns, with the loss of that: one stage does both."""

    def __init__(self, node: RunnableStage, loss: Callable[[Any], Any]) -> None:
        self.inputs, self.outputs, self.module = node.inputs, node.outputs, node.module
        self._node, self._loss = node, loss

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        made = self._node(values)
        return {**made, OUTPUT: self._loss(made[OUTPUT])}


def look_at(module: RunnableStage, values: Mapping[str, Any], kept: set[int]) -> tuple[dict[str, Any], Cost]:
    """The values of a node, without their graph, and its bytes; `kept`: memory that earlier nodes keep."""
    activation, cast, found = _measure_activation(module, values, kept)
    sizes = {name: sum(map(_count_bytes, tensors_in(value))) for name, value in found.items() if name != OUTPUT}
    return found, Cost(activation=activation, cast=cast, sizes=sizes)


def profile_of(
    graph: Graph, costs: Mapping[str, Cost], inputs: Mapping[str, Any], device: str, memory: int | None = None
) -> Profile:
    """The graph with the costs of its nodes; what has none is a part of the value of the node before it."""
    nodes, spread = list[GraphNode](), dict[str, float]()
    sizes = {name: size for cost in costs.values() for name, size in cost.sizes.items()}
    for node in graph.nodes:
        cost = costs.get(node.name)
        if cost is None:
            nodes.append(replace(node, output=sizes.get(node.name, node.output)))
            continue
        given, late, full = median(cost.input_grad), median(cost.weight_grad), median(cost.backward)
        nodes.append(
            replace(
                node,
                forward=median(cost.forward),
                input_grad=min(given, full) if late else full,
                weight_grad=late,
                unsplit=full,
                activation=cost.activation,
                cast=cost.cast,
                output=sizes.get(node.name, 0),
            )
        )
        spread[node.name] = _compute_spread([a + b for a, b in zip(cost.forward[::2], cost.backward, strict=True)])
    samples = next((len(leaf) for leaf in tensors_in(dict(inputs)) if leaf.dim()), 1)
    return Profile(Graph(tuple(nodes), graph.shared, graph.frozen), (Device(1.0, memory),), (), samples, spread, device)


def _compute_spread(times: Sequence[float]) -> float:
    if len(times) < 2 or not median(times):
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / 2 / median(times)


# ---- what is kept for backward ----


def _measure_activation(
    module: RunnableStage, values: Mapping[str, Any], kept: set[int]
) -> tuple[int, int, dict[str, Any]]:
    """Bytes that the graph of a forward keeps, without weights; of these, apart, what autocast keeps of the weights for
    all micro-batches; and the node's values. What earlier nodes keep already, `kept`
    by memory, counts with them: so the node gets their memory itself, if it does not change it in place."""
    alive = {_get_storage_key(leaf) for value in values.values() for leaf in tensors_in(value)}
    kept.intersection_update(alive)  # memory that no value has any more can be another's by now
    given = {name: pytree.tree_map(_no_graph, values[name]) for name in module.inputs}  # hooks on it go with it
    copies = {name: copy_of(value) for name, value in given.items()}
    for attempt, is_seen in ((given, True), (copies, True), (copies, False)):
        saved = _SavedTensorCounter(module.module)
        try:
            with torch.enable_grad(), saved if is_seen else contextlib.nullcontext():
                made = module(attempt)
            break
        except RuntimeError as error:
            if not is_seen or (attempt is copies and _UNSEEN not in str(error)):
                raise
    if not is_seen:  # it keeps its results at least
        results = [leaf for value in made.values() for leaf in tensors_in(value) if leaf.requires_grad]
        saved.sizes = {_get_storage_key(leaf): int(leaf.untyped_storage().nbytes()) for leaf in results}
    casts = _find_cast_memory(module, given, saved) - alive if is_seen else set()
    total = sum(size for memory, size in saved.sizes.items() if memory not in kept and memory not in casts)
    made = {name: pytree.tree_map(_no_graph, value) for name, value in made.items()}
    alive.update(_get_storage_key(leaf) for value in made.values() for leaf in tensors_in(value))
    kept.update(saved.sizes.keys() & alive)
    return total, sum(saved.sizes[memory] for memory in casts), made


def _find_cast_memory(module: RunnableStage, given: Mapping[str, Any], saved: _SavedTensorCounter) -> set[int]:
    """The memory that another micro-batch keeps too, under autocast."""
    if not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return set()
    again = _SavedTensorCounter(module.module)
    with torch.enable_grad(), again:
        module({name: copy_of(value) for name, value in given.items()})
    return saved.sizes.keys() & again.sizes.keys()


_UNSEEN = "saved tensor hooks"  # what torch says of torch.func.grad and its like, which allow none


class _SavedTensorCounter(torch.autograd.graph.saved_tensors_hooks):  # type: ignore[misc]  # torch is not where types are checked
    """The memory that a graph keeps, and the bytes of each."""

    def __init__(self, module: nn.Module) -> None:
        own = {_get_storage_key(each) for each in (*module.parameters(), *module.buffers())}
        self.sizes: dict[int, int] = {}
        self._hold: list[Any] = []  # memory that is given back while the forward runs could come again

        def pack(tensor: Any) -> Any:
            tensor = tensor.detach()  # a graph that holds its own results is never freed
            if _get_storage_key(tensor) not in own:
                self.sizes[_get_storage_key(tensor)] = int(tensor.untyped_storage().nbytes())
                self._hold.append(tensor)
            return tensor

        super().__init__(pack, lambda tensor: tensor)


# ---- tensors ----


@contextlib.contextmanager
def lend_weights(module: nn.Module, device: Any) -> Iterator[None]:
    """Keep all weights on the device while inside; those without data are random numbers there."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    copies: dict[int, Any] = {}
    for each in module.modules():
        for held in (each._parameters, each._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    before.append((held, name, tensor))
                    if id(tensor) not in copies:
                        copies[id(tensor)] = _put_tensor(tensor, device, isinstance(tensor, nn.Parameter))
    try:
        for held, name, tensor in before:
            held[name] = copies[id(tensor)]
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


def _put_tensor(tensor: Any, device: Any, parameter: bool) -> Any:
    if tensor.device.type == "meta":
        data = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if data.is_floating_point():
            data.normal_(std=0.02)
    else:
        # A copy: a forward may write its statistics, and its weights too, which are not to be those of a measurement.
        data = tensor.detach().to(device, copy=True)
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if parameter else data


def _move_value(value: Any, device: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def _no_graph(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _get_storage_key(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _count_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
