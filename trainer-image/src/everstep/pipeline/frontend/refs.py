"""Represent the inputs of a recorded call as data: structures in which a reference stands for each tensor, size and
device."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from everstep.pipeline.errors import PipelineError

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# What holds no tensors.
_CLOSED = (*_PLAIN, *_SYMBOLIC, torch.dtype, torch.device, torch.layout, torch.memory_format, slice, torch.Size)


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A tensor that an operation made, by its place in the record."""

    index: int


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor in an argument of the model; `path` leads to it through dictionaries, lists and tuples."""

    name: str
    path: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or a buffer, by the first of its names."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that was there before the call and that no module has registered."""

    index: int


@dataclass(frozen=True, slots=True)
class Size:
    """A number that follows from the shapes of the arguments: a sympy expression, to be made a `kind`."""

    expr: Any
    kind: type


@dataclass(frozen=True, slots=True)
class Here:
    """The device that the model is on."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice with references in it."""

    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A torch.Size with references in it."""

    parts: tuple[Any, ...]


Ref = ValueRef | Argument | Weight | Constant | Size | Here
Template = Any  # a structure with references for leaves


@dataclass(slots=True)
class Frame:
    """The values for which references stand while one micro-batch is in a stage."""

    values: dict[int, Any]
    arguments: dict[str, Any]
    device: Any
    sizes: dict[Any, Any] = field(default_factory=dict)


Maker = Callable[[Frame], Any]


def make_template(structure: Any, refer: Callable[[Any], Any]) -> Template:
    """`structure` with `refer(leaf)` in the place of each leaf."""

    def leaf(item: Any) -> Any:
        if isinstance(item, slice):
            ends = leaf(item.start), leaf(item.stop), leaf(item.step)  # sizes that have become numbers are numbers
            return Slice(*ends) if any(map(is_reference, ends)) else slice(*ends)
        if isinstance(item, torch.Size):
            parts = tuple(map(leaf, item))
            return Shape(parts) if any(map(is_reference, parts)) else item
        return refer(item)

    return pytree.tree_map(leaf, structure)


def is_reference(item: Any) -> bool:
    return isinstance(item, ValueRef | Argument | Weight | Constant | Size | Here | Slice | Shape)


def iterate_references(found: Template) -> Iterator[Ref]:
    """All references in a template, those in slices too."""
    for leaf in pytree.tree_leaves(found):
        if isinstance(leaf, Slice):
            yield from (part for part in (leaf.start, leaf.stop, leaf.step) if is_reference(part))
        elif isinstance(leaf, Shape):
            yield from filter(is_reference, leaf.parts)
        elif is_reference(leaf):
            yield leaf


def compile_maker(found: Template, bind: Callable[[Ref], Maker]) -> Maker:
    """A function that makes the structure anew, with what `bind(reference)` finds in a frame."""
    if isinstance(found, Slice):
        start, stop, step = (compile_maker(part, bind) for part in (found.start, found.stop, found.step))
        return lambda frame: slice(start(frame), stop(frame), step(frame))
    if isinstance(found, Shape):
        return compile_maker(found.parts, bind)
    if is_reference(found):
        return bind(found)
    if pytree.tree_is_leaf(found) or (_is_immutable(found) and not any(True for _ in iterate_references(found))):
        return lambda frame: found
    if type(found) is tuple:
        parts = [compile_maker(part, bind) for part in found]
        if len(parts) == 2:  # arguments, by place and by name, of which each step of each micro-batch makes a pair
            one, two = parts
            return lambda frame: (one(frame), two(frame))
        if len(parts) == 1:
            [only] = parts
            return lambda frame: (only(frame),)
        return lambda frame: tuple([part(frame) for part in parts])
    if type(found) is dict:
        items = {key: compile_maker(part, bind) for key, part in found.items()}
        if not items:
            return lambda frame: {}
        return lambda frame: {key: part(frame) for key, part in items.items()}
    leaves, spec = pytree.tree_flatten(found)
    makers = [compile_maker(leaf, bind) for leaf in leaves]
    return lambda frame: pytree.tree_unflatten([make(frame) for make in makers], spec)


def _is_immutable(found: Any) -> bool:
    """Tell whether a value cannot be changed, and so needs not be made anew each time."""
    try:
        hash(found)
    except TypeError:
        return False
    return True


def compile_binder(found: Template) -> Callable[[Any, Frame], None]:
    """A function that puts the tensors of a result into a frame, under the values that the template names."""
    if isinstance(found, ValueRef):
        index = found.index

        def put(result: Any, frame: Frame) -> None:
            frame.values[index] = result

        return put
    leaves = pytree.tree_leaves(found)
    wanted = [(place, leaf.index) for place, leaf in enumerate(leaves) if isinstance(leaf, ValueRef)]
    if not wanted:
        return lambda result, frame: None

    def put_all(result: Any, frame: Frame) -> None:
        tensors = pytree.tree_leaves(result)
        for place, index in wanted:
            frame.values[index] = tensors[place]

    return put_all


def compile_result_binder(
    found: Template, plain: Mapping[bool, Mapping[int, Any]], module: nn.Module, name: str
) -> Callable[[Any, Frame], None]:
    """A function that does the same with the result of a module that runs as it is.

    Numbers, flags and missing tensors in a result are part of the trace, since code around the module goes by them.

    Args:
        found: The template of the result.
        plain: Of each mode of the module, what is no tensor in its result, as `list_plain_leaves` gives it.
        module: The module.
        name: The name of the call.
    """
    if isinstance(found, ValueRef):
        index = found.index

        def put_only(result: Any, frame: Frame) -> None:
            if not isinstance(result, torch.Tensor):
                raise _make_result_error(name, f"{result!r:.80}", "a tensor")
            frame.values[index] = result

        return put_only
    leaves, structure = pytree.tree_flatten(found)
    wanted = [(place, leaf.index) for place, leaf in enumerate(leaves) if isinstance(leaf, ValueRef)]
    places = [place for place, _ in wanted]

    def put(result: Any, frame: Frame) -> None:
        given, own = pytree.tree_flatten(result)
        # Also where keys are others, or in another order: values are told apart by their places. Made again as the
        # template was, since a torch.Size is a tuple then.
        if own != structure and pytree.tree_structure(pytree.tree_unflatten(given, own)) != structure:
            both = (own, structure) if len(given) == len(leaves) else None
            now, before = map(_show_structure, both) if both else (f"{len(given)} values", str(len(leaves)))
            raise _make_result_error(name, now, before)
        _check_result(name, given, places, plain[module.training])
        for place, index in wanted:
            frame.values[index] = given[place]

    return put


def _show_structure(structure: Any) -> str:
    return repr(pytree.tree_unflatten([...] * structure.num_leaves, structure)).replace("Ellipsis", "…")


def list_plain_leaves(found: Template) -> dict[int, Any]:
    """Return the numbers, texts, flags and missing values in a template, by their places."""
    return {place: leaf for place, leaf in enumerate(pytree.tree_leaves(found)) if isinstance(leaf, _PLAIN)}


def are_plain_leaves_equal(one: Mapping[int, Any], other: Mapping[int, Any]) -> bool:
    """Tell whether two of what `list_plain_leaves` gives are the same."""
    return one.keys() == other.keys() and all(_are_equal(each, other[place]) for place, each in one.items())


def _check_result(name: str, given: Sequence[Any], tensors: Sequence[int], plain: Mapping[int, Any]) -> None:
    for place in tensors:
        if not isinstance(given[place], torch.Tensor):
            raise _make_result_error(name, repr(given[place]), "a tensor")
    for place, wanted in plain.items():
        if not _are_equal(given[place], wanted):
            now = "a tensor" if isinstance(given[place], torch.Tensor) else repr(given[place])
            raise _make_result_error(name, now, repr(wanted))


def _are_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _make_result_error(name: str, now: str, before: str) -> PipelineError:
    return PipelineError(
        f"module {name!r} returned {now}, and {before} when pipeline() was called: the code around it was traced with "
        "that, and would go by it. Numbers, flags, keys and missing tensors that depend on data cannot leave a module: "
        "let the code that goes by them be in the same module, or return a tensor"
    )


def holds_more(leaf: Any) -> bool:
    """Tell whether a leaf may hold tensors that the recorder does not see."""
    if isinstance(leaf, (torch.Tensor, *_CLOSED)):
        return False
    return not callable(leaf) and not isinstance(leaf, enum.Enum) and hasattr(leaf, "__dict__")


def register_dataclasses(structure: Any) -> Any:
    """Return a structure, after its dataclasses are registered with torch's pytree as structures of their fields."""
    while found := {type(leaf) for leaf in pytree.tree_leaves(structure) if _has_only_fields(leaf)}:
        for each in found:
            pytree.register_pytree_node(each, _list_fields, partial(_make_dataclass, each))
    return structure


def _has_only_fields(leaf: Any) -> bool:
    """Tell whether a leaf is an instance of a dataclass with tensors in it, and with nothing beside its fields."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type | torch.Tensor | nn.Module | dict | list | tuple):
        return False
    values, names = _list_fields(leaf)
    has_tensors = any(isinstance(each, torch.Tensor) or _has_only_fields(each) for each in pytree.tree_leaves(values))
    return has_tensors and getattr(leaf, "__dict__", {}).keys() <= set(names)


def _list_fields(instance: Any) -> tuple[list[Any], tuple[str, ...]]:
    names = tuple(each.name for each in dataclasses.fields(instance) if hasattr(instance, each.name))
    return [getattr(instance, name) for name in names], names


def _make_dataclass(kind: type, values: Iterable[Any], names: tuple[str, ...]) -> Any:
    made: Any = object.__new__(kind)  # its fields have what __init__ computed, from tensors
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def describe_odd_result(result: Any) -> str:
    """Describe what in a model's result is no tensor and no structure of tensors, and where it is."""
    found = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(result)[0] if holds_more(leaf)]
    return (
        f"a {type(found[0][1]).__name__} (in result{pytree.keystr(found[0][0])})"
        if found
        else "a tensor from elsewhere"
    )
