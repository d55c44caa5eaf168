"""Count what each node would cost, on tensors without data: for models that no device here can hold.

Each operation takes as long as its arithmetic or its memory traffic, whichever is longer, at the rates of a device that
is only named by them: the sums are good for comparing nodes, not for predicting seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from everstep.pipeline.engine.stage import INPUT, RunnableStage
from everstep.pipeline.frontend.compiled import disable_compilation
from everstep.pipeline.frontend.opaque import list_whole_numbers
from everstep.pipeline.graph import Graph, Profile
from everstep.pipeline.profile import lend_weights, look_at, profile_of
from everstep.pipeline.profile_runs import Cost, run_microbatches

FLOPS = 50e12  # operations per second, and bytes per second: the ratio is that of the accelerators of today
BYTES = 1e12
LAUNCH = 2e-6  # seconds that an operation takes at least


def count_costs(graph: Graph, nodes: Mapping[str, RunnableStage], inputs: Mapping[str, Any]) -> Profile:
    """The graph with counted times and bytes, for micro-batches like `inputs`, which may be on the meta device.

    Nodes that depend on data are run once on random numbers, each by itself, on the processor. What is compiled is
    counted as it was written: a compiled kernel would read the memory that tensors without data do not have.
    """
    with disable_compilation():
        return profile_of(graph, _count_nodes(graph, nodes, inputs), inputs, "counted")


def _count_nodes(graph: Graph, nodes: Mapping[str, RunnableStage], inputs: Mapping[str, Any]) -> dict[str, Cost]:
    fake = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    counter = _Counter()
    with fake:
        values = {INPUT + name: pytree.tree_map(_without_data, value) for name, value in inputs.items()}
    kept: set[int] = set()
    costs = {}
    for node in graph.nodes:
        module = nodes.get(node.name)
        if module is None:
            continue
        try:
            with fake, lend_weights(module.module, torch.device("cpu")):
                made, costs[node.name] = counter.cost_of(node.name, module, values, kept)
        except Exception:
            with (
                _disable_current_modes(),
                torch.random.fork_rng(devices=[]),
                lend_weights(module.module, torch.device("cpu")),
            ):
                real, costs[node.name] = _count_on_random_numbers(counter, node.name, module, values, kept)
            with fake:
                made = {name: pytree.tree_map(_without_data, value) for name, value in real.items()}
        values |= made
    return costs


class _Counter(TorchDispatchMode):  # type: ignore[misc]  # torch is not where types are checked
    """Adds up what operations would take."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def cost_of(
        self, name: str, module: RunnableStage, values: Mapping[str, Any], kept: set[int]
    ) -> tuple[dict[str, Any], Cost]:
        """The values of a node, and what it takes."""
        made, cost = look_at(module, values, kept)
        run_microbatches({name: module}, values, {name: cost}, self.time)
        return made, cost

    def time(self, work: Any) -> tuple[Any, float]:
        self.seconds = 0.0
        with self:
            result = work()
        return result, self.seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
            return result  # a view: nothing moves
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            return result  # a question
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        traffic = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        formula = flop_registry.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=result) if formula is not None else 0
        self.seconds += max(flops / FLOPS, traffic / BYTES, LAUNCH)
        return result


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="cpu")
    return made.requires_grad_(leaf.requires_grad)


def _count_on_random_numbers(
    counter: _Counter, name: str, module: RunnableStage, values: Mapping[str, Any], kept: set[int]
) -> tuple[dict[str, Any], Cost]:
    def count(whole: int) -> tuple[dict[str, Any], Cost]:
        make = partial(_make_random_leaf, whole=whole)
        data = {each: pytree.tree_map(make, values[each]) for each in module.inputs}
        return counter.cost_of(name, module, data, kept)

    leaves = pytree.tree_leaves([values[each] for each in module.inputs])
    index, *lengths = list_whole_numbers(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
    try:
        return count(index)
    except Exception:
        for length in lengths[:-1]:
            with contextlib.suppress(Exception):
                return count(length)
        return count(lengths[-1])


def _make_random_leaf(leaf: Any, whole: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = tuple(leaf.shape)
    if leaf.dtype.is_floating_point:
        return torch.randn(shape, dtype=leaf.dtype, device="cpu").requires_grad_(leaf.requires_grad)
    return torch.full(shape, whole, dtype=leaf.dtype, device="cpu")
