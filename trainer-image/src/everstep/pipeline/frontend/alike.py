"""Group the nodes of a traced model that do the same work, such as those of equal layers: it is measured only once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from everstep.pipeline.frontend.record import Call, Op
from everstep.pipeline.frontend.refs import Argument, Shape, Slice, Template, ValueRef, Weight
from everstep.pipeline.frontend.trace import Traced
from everstep.pipeline.frontend.units import Unit


def group_alike_nodes(found: Traced) -> list[list[str]]:
    """Group the nodes that run the same operations, on tensors of the same shapes.

    Args:
        found: The traced model.

    Returns:
        The names of the nodes of each group, in the model's order; most often those of equal layers. A node whose work
        depends on data, and the model's output, is in a group of its own.
    """
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for unit in found.units.all:
        groups[_Signature(found).of(unit)].append(unit.name)
    return list(groups.values())


class _Signature:
    """All that the time of one node depends on. Tensors are numbered in the order in which they are met."""

    def __init__(self, found: Traced) -> None:
        self._record, self._makers = found.record, found.units.makers
        self._numbers: dict[Hashable, int] = {}

    def of(self, unit: Unit) -> Hashable:
        try:
            return unit.name if unit.item is None else self._item(unit.item)
        except TypeError:  # something in it cannot be hashed, or depends on data
            return unit.name

    def _item(self, item: Op | Call) -> Hashable:
        around = item.grad, item.autocast, self._template(item.inputs), self._template(item.other)
        if isinstance(item, Op):
            return item.func, item.draws, *around, self._template(item.outputs)
        if item.opaque:
            raise TypeError(item.opaque)
        body = tuple(map(self._item, item.body))
        return type(item.module), item.training, item.whole, *around, body, self._template(item.outputs)

    def _template(self, found: Template) -> Hashable:
        leaves, spec = pytree.tree_flatten(found)
        return str(spec), tuple(map(self._leaf, leaves))

    def _leaf(self, leaf: Any) -> Hashable:
        match leaf:
            case ValueRef(index):
                # Of what was not made in this node, who made it says how it lies in memory.
                maker = self._makers.get(index)
                kind = maker.func if isinstance(maker, Op) else None
                tensor = self._record.values[index]
                return "value", self._number(leaf), kind, tensor.shape, tensor.dtype, tensor.gradient
            case Weight(name):
                weight = self._record.weights[name]
                kind = isinstance(weight, nn.Parameter)
                layout = tuple(weight.shape), weight.stride(), weight.dtype, weight.requires_grad
                return "weight", self._number(leaf), kind, layout
            case Slice(start, stop, step):
                return "slice", self._leaf(start), self._leaf(stop), self._leaf(step)
            case Shape(parts):
                return "shape", tuple(map(self._leaf, parts))
            case slice():
                return "slice", leaf.start, leaf.stop, leaf.step
            case Argument():
                return leaf
        hash(leaf)
        return type(leaf), leaf

    def _number(self, ref: Hashable) -> int:
        return self._numbers.setdefault(ref, len(self._numbers))
