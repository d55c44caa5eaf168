"""Values that are tensors, or structures of them as torch knows them; and what is told of one before it is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from everstep.pipeline.engine.strides import describe_strides
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.transport.base import Spec


@dataclass(frozen=True, slots=True)
class TensorPlaceholder:
    """Stands in a structure where the tensor of this index was."""

    index: int


class ValueLayout(NamedTuple):
    """The layout of a value without its numbers: its structure with a TensorPlaceholder for each tensor, and their
    specs in order."""

    structure: Any
    specs: tuple[Spec, ...]

    def agrees(self, other: ValueLayout) -> bool:
        """Tell whether the other layout is the same, but for how tensors lie in memory."""
        return self == other or (
            self.structure == other.structure
            and [spec._replace(strides=None) for spec in self.specs]
            == [spec._replace(strides=None) for spec in other.specs]
        )


@dataclass(slots=True)
class StageValue:
    """A value as it travels: detached tensors, in the order of `layout`."""

    layout: ValueLayout
    tensors: list[torch.Tensor]


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure, with what `change` gives for each tensor; other leaves stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        items_of = {key: map_tensors(item, change) for key, item in value.items()}
        return items_of if type(value) is dict else _rebuild_container(value, items_of)
    return _map_parts(value, lambda part: map_tensors(part, change))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, in the order of its structure."""
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def flatten_tensors(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the structure and the tensors of a value; `unflatten_tensors` puts them together again."""
    found: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> TensorPlaceholder:
        found.append(tensor)
        return TensorPlaceholder(len(found) - 1)

    if isinstance(value, torch.Tensor):  # most are
        return TensorPlaceholder(0), [value]
    return map_tensors(value, take), found


def unflatten_tensors(structure: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the value that `flatten_tensors` took apart."""
    if isinstance(structure, TensorPlaceholder):
        return tensors[structure.index]
    if isinstance(structure, tuple):
        items = [unflatten_tensors(item, tensors) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
    if isinstance(structure, list):
        return [unflatten_tensors(item, tensors) for item in structure]
    if isinstance(structure, dict):
        return {key: unflatten_tensors(item, tensors) for key, item in structure.items()}
    return _map_parts(structure, lambda part: unflatten_tensors(part, tensors))


def value_of(name: str, given: Any) -> tuple[StageValue, list[torch.Tensor]]:
    """A stage's output `given` as it travels, and its tensors with their graph.

    PipelineError if something in it cannot travel.
    """
    structure, tensors = flatten_tensors(given)
    _check_structure(name, structure)
    specs = tuple(Spec(tuple(each.shape), each.dtype, each.requires_grad, describe_strides(each)) for each in tensors)
    return StageValue(ValueLayout(structure, specs), [tensor.detach() for tensor in tensors]), tensors


def _check_structure(name: str, structure: Any) -> None:
    if isinstance(structure, TensorPlaceholder | str | int | float | bool | complex | None | torch.dtype | torch.Size):
        return
    if isinstance(structure, dict):
        structure = tuple(structure.values())
    if not isinstance(structure, list | tuple):
        raise PipelineError(
            f"value {name!r} holds a {type(structure).__name__}, which cannot go to another stage: "
            "only tensors, numbers, strings, and tuples, lists and dictionaries of them can; keep its makers and its "
            "users in one stage"
        )
    for item in structure:
        _check_structure(name, item)


def _map_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with each part changed, if torch knows its class as one that has parts."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return value
    parts, context = node.flatten_fn(value)
    return node.unflatten_fn([change(part) for part in parts], context)


def _rebuild_container(like: dict[Any, Any], items: dict[Any, Any]) -> Any:
    # Ordered and default dictionaries, and the outputs of transformers, which know their keys as arguments.
    try:
        return type(like)(**items)
    except TypeError:
        return items
