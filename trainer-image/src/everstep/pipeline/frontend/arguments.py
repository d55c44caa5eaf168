"""Name what a model is called with by the arguments of its forward."""

from __future__ import annotations

import enum
import inspect
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.attributes import held_copy, is_as_it_was, is_plain
from everstep.pipeline.frontend.record import Untraceable

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


_BY_POSITION_ONLY = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL


@dataclass(frozen=True)
class _TensorKind:
    """The part of a tensor that belongs to a trace, since code goes by it, as by `x.dim()` and `mask.dtype`."""

    dtype: torch.dtype
    dims: int
    layout: torch.layout

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tensor.dtype, tensor.dim(), tensor.layout)

    def __str__(self) -> str:
        layout = "" if self.layout is torch.strided else f", {self.layout}"
        return f"a tensor of {self.dtype} with {self.dims} dimension{'s' * (self.dims != 1)}{layout}"


@dataclass(frozen=True)
class _PlainKind:
    """A copy of a container of plain values that pytree does not look into, as a set, which may be changed in place."""

    kind: type
    copy: Any

    def fits(self, given: Any) -> bool:
        return type(given) is self.kind and bool(held_copy(given) == self.copy)


def _keep_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _TensorKind.of(leaf)
    is_copied = not isinstance(leaf, _PLAIN) and (is_plain(leaf) or isinstance(leaf, SimpleNamespace))
    return _PlainKind(type(leaf), held_copy(leaf)) if is_copied else leaf


class Arguments:
    """The arguments of one module. An example or a batch is a tensor, a tuple of positional arguments, or a mapping by
    names."""

    def __init__(self, module: Any) -> None:
        self._traced: dict[str, Any] | None = None
        self._changed: frozenset[str] = frozenset()
        self._laid_out: frozenset[str] = frozenset()
        self._read: Mapping[str, Any] = {}
        self._signature = inspect.signature(module.forward)
        kinds = {each.kind: name for name, each in self._signature.parameters.items()}
        self._rest = kinds.get(inspect.Parameter.VAR_KEYWORD)

    def name(self, given: Any) -> dict[str, Any]:
        """Return what was given by argument names, without what was left out.

        Raises:
            Untraceable: It does not fit the arguments of forward.
            PipelineError: There are tensors in objects that the pipeline does not look into.
        """
        if isinstance(given, Mapping):
            return self.of_call(*self._of_mapping(given))
        return self.of_call(given if isinstance(given, tuple) else (given,), {})

    def _of_mapping(self, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords for what is given by names, also for what a call can give by position only."""
        kinds = {name: each.kind for name, each in self._signature.parameters.items()}
        last = max(
            (at for at, name in enumerate(kinds) if name in given and kinds[name] in _BY_POSITION_ONLY), default=-1
        )
        args: list[Any] = []
        for name in list(kinds)[: last + 1]:
            if name not in given:
                return (), dict(given)  # which the signature refuses
            args += given[name] if kinds[name] is inspect.Parameter.VAR_POSITIONAL else [given[name]]
        return tuple(args), {name: value for name, value in given.items() if name not in list(kinds)[: last + 1]}

    def of_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The same of a call with both."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise Untraceable(f"the example does not fit the arguments of forward: {error}") from error
        named = dict(bound.arguments)
        extra = named.pop(self._rest, {}) if self._rest else {}
        found = {**named, **extra}
        for name, value in found.items():
            if (kind := find_hidden_data(value)) is not None:
                raise PipelineError(
                    f"the argument {name!r} has a {kind}, which holds tensors or arrays: they would not be cut into "
                    "micro-batches, and stay those of the example; give them as tensors, or in dictionaries, lists, "
                    "tuples and named tuples"
                )
        return found

    def refuse_changed_targets(self, given: Any, targets: Any) -> None:
        """Check that a forward which changes a batch in place changes nothing of what its loss is given.

        Args:
            given: A batch, as for `name`.
            targets: Its targets.

        Raises:
            PipelineError: They are in the same memory: the loss would see the change in one process, and here it runs
                on another.
        """
        if not self._changed or given is None:
            return
        named = self.name(given)
        memory = {_get_address(each) for each in _list_tensors(targets)} - {0}
        for name in sorted(self._changed):
            for each in _list_tensors(named.get(name)):
                if _get_address(each) in memory:
                    raise PipelineError(
                        f"forward changes its argument {name!r} in place, and the targets are in the same memory: in "
                        "one process the loss would be given what forward made of them, in a pipeline what they were; "
                        "give targets that are a copy (clone()), or let forward change nothing of its arguments"
                    )

    def traced_with(
        self,
        named: Mapping[str, Any],
        changed: Collection[str] = (),
        laid_out: Collection[str] = (),
        read: Mapping[str, Any] | None = None,
    ) -> None:
        """Let `check` compare with these arguments from here on; `changed`: those that the forward changes in place;
        `laid_out`: those of which its code asks how they lie in memory; `read`: what it reads of objects in them, by
        the names that lead there."""
        self._changed, self._laid_out, self._read = frozenset(changed), frozenset(laid_out), dict(read or {})
        self._traced = {name: pytree.tree_map(_keep_leaf, value) for name, value in named.items()}

    def check(self, named: Mapping[str, Any], needed: Collection[str] = (), *, is_first: bool = False) -> None:
        """PipelineError if the trace says nothing of a call with these, because what is no tensor is part of a trace:
        for another number, text, choice or object, for a tensor where there was none, or of another type or number of
        dimensions, and for keywords in another order. What is None, or not there, is looked at only in `needed`, what
        this process reads, and where there was no tensor by the process with the first stage (`is_first`)."""
        if self._traced is None:
            return
        for name in needed:
            if name in named and named[name] is None and self._traced.get(name) is not None:
                raise PipelineError(
                    f"the argument {name!r} is None, but was not in the example that the model was traced with: make a "
                    "pipeline for each choice"
                )
        for name in named.keys() - self._traced.keys():
            if named[name] is not None:
                raise PipelineError(
                    f"the argument {name!r} was not in the example that the model was traced with, and would be of no "
                    "effect: give it there too"
                )
        for name, known in self._traced.items():
            parameter = self._signature.parameters.get(name)
            default = parameter.default if parameter is not None else None
            given = named.get(name, None if isinstance(known, _TensorKind) else default)
            if is_first and given is None and _has_no_tensor(known):
                raise PipelineError(
                    f"the argument {name!r} is None or not there, and was {known!r:.80} in the example that the model "
                    "was traced with: make a pipeline for each choice"
                )
            if (
                given is not None
                and given is not inspect.Parameter.empty
                and (why := _describe_difference(known, given)) is not None
            ):
                raise PipelineError(
                    f"the argument {name!r} {why}, with which the model was traced: only the numbers and the sizes of "
                    "tensors may change; give a number as a tensor, torch.tensor(0.5), convert tensors to the type of "
                    "the example's, and make a pipeline for each other choice"
                )
        for path, value in self._read.items():
            name, _, part = path.partition(".")
            if named.get(name) is not None and not is_as_it_was(named, path, value):
                raise PipelineError(
                    f"{part!r} of the argument {name!r} is another than in the example, where it was {value!r:.80}: "
                    "the stages have what forward reads of objects as it was then: give it as an argument of its own "
                    "that is a tensor, or call pipeline() again"
                )
        self.refuse_other_layout(named, self._laid_out)
        self._check_order(named)
        self._check_memory(named)

    def refuse_other_layout(self, named: Mapping[str, Any], laid_out: Collection[str]) -> None:
        """PipelineError if one of the arguments in `laid_out` does not lie in memory as in a trace, contiguously."""
        for name in sorted(laid_out):
            if not all(each.is_contiguous() for each in _list_tensors(named.get(name)) if each.layout is torch.strided):
                raise PipelineError(
                    f"forward asks how its argument {name!r} lies in memory (stride(), storage_offset(), "
                    "is_contiguous(), as_strided()), and was traced for a contiguous one, which this is not: give "
                    "contiguous() of it"
                )

    def _check_order(self, named: Mapping[str, Any]) -> None:
        """PipelineError if what `forward` takes by `**` comes in another order, in which it may go through them."""
        before = [name for name in self._traced or () if name in named and name not in self._signature.parameters]
        now = [name for name in named if name in before]
        if now != before:
            raise PipelineError(
                f"the arguments {', '.join(now)} are in another order than in the example ({', '.join(before)}), and "
                f"forward gets them as **{self._rest}, which has an order: give them as in the example"
            )

    def _check_memory(self, named: Mapping[str, Any]) -> None:
        """PipelineError if `forward` changes an argument in place of which another one has a part."""
        if not self._changed:
            return
        spans = {name: [_get_span(each) for each in _list_tensors(named.get(name))] for name in named}
        for name in sorted(self._changed & spans.keys()):
            own = spans[name]
            if any(_do_overlap(one, two) for at, one in enumerate(own) for two in own[at + 1 :]):
                raise PipelineError(
                    f"forward changes a tensor in its argument {name!r} in place, and another one in it is in the same "
                    "memory: in one process it would change too, in a pipeline each stage has its own: give a copy "
                    "(clone()), or let forward change nothing of its arguments"
                )
            for other in spans.keys() - {name}:
                if any(_do_overlap(one, two) for one in spans[name] for two in spans[other]):
                    raise PipelineError(
                        f"forward changes its argument {name!r} in place, and the argument {other!r} is in the same "
                        "memory: in one process it would change too, in a pipeline each stage has its own: give a copy "
                        "(clone()), or let forward change nothing of its arguments"
                    )

    def fits(self, named: Mapping[str, Any]) -> bool:
        """Tell whether the module can be called with these."""
        return self.fits_by_name(named) or _can_bind(self._signature, tuple(named.values()), {})

    def fits_by_name(self, named: Mapping[str, Any]) -> bool:
        """Tell whether these names are those of the module's arguments, and not of one inside it."""
        return _can_bind(self._signature, *self._of_mapping(named))

    def call(self, module: Any, named: Mapping[str, Any]) -> Any:
        """The module's result for arguments as `name` gives them; by their order, where they have names of another."""
        if not self.fits_by_name(named) and self.fits(named):
            return module(*named.values())
        own = {name: value for name, value in named.items() if name in self._signature.parameters}
        bound = inspect.BoundArguments(self._signature, own)
        rest = {name: value for name, value in named.items() if name not in self._signature.parameters}
        return module(*bound.args, **bound.kwargs, **rest)


def _has_no_tensor(known: Any) -> bool:
    """Tell whether something is not None and holds no tensor."""
    return known is not None and not any(isinstance(leaf, _TensorKind) for leaf in pytree.tree_leaves(known))


def _list_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _get_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's memory begins and ends, as bytes; what has none is empty."""
    if not _get_address(tensor):
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _do_overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _get_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.numel() else 0


def _can_bind(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _describe_difference(known: Any, given: Any) -> str | None:
    """Describe what differs in `given`, apart from the tensors' numbers and shapes; None if nothing does."""
    (before, shape), (now, form) = pytree.tree_flatten(known), pytree.tree_flatten(given)
    if len(before) != len(now) or shape != form:
        return "is built otherwise than in the example"
    for old, new in zip(before, now, strict=True):
        if isinstance(old, _TensorKind) != isinstance(new, torch.Tensor):
            return "is a tensor now, and was none in the example" if isinstance(new, torch.Tensor) else "was a tensor"
        if isinstance(new, torch.Tensor) and (kind := _TensorKind.of(new)) != old:
            return f"is {kind} now, and was {old} in the example"
        if isinstance(old, _PLAIN) and isinstance(new, _PLAIN) and old != new and not (old != old and new != new):
            return f"is {new!r} now, and was {old!r} in the example"
        if not isinstance(new, torch.Tensor) and not (
            old.fits(new) if isinstance(old, _PlainKind) else _are_equal(old, new)
        ):
            return f"is another {type(new).__name__} than in the example"
    return None


def _are_equal(one: Any, other: Any) -> bool:
    """Tell whether two objects without tensors are equal, as far as can be known."""
    if one is other or type(one) is not type(other):
        return one is other
    if (
        getattr(type(one), "__eq__", None) is not object.__eq__
    ):  # as of dictionaries of a kind, which have nothing in their vars
        return bool(one == other)
    return hasattr(one, "__dict__") and vars(one) == vars(other)


def find_hidden_data(value: Any) -> str | None:
    """Return the kind of an object in which there are tensors or arrays beside those of plain structures; None if there
    is none."""
    # Others that pytree knows, as deques and registered classes, are not looked into by those who cut batches.
    for leaf in pytree.tree_leaves(value, is_leaf=lambda each: not isinstance(each, dict | list | tuple)):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)) and _holds_data(leaf, set()):
            return type(leaf).__name__
    return None


def refuse_uncut_targets(targets: Any, samples: int | None = None) -> None:
    """Check that what a loss is given can be cut into micro-batches with the samples.

    Args:
        targets: The targets of a batch.
        samples: The number of samples in the batch, where it is known.

    Raises:
        PipelineError: There are tensors or arrays in objects that are not looked into, or a list of something else with
            one item for each sample: each micro-batch would get those of all.
    """
    if (kind := find_hidden_data(targets)) is not None:
        raise PipelineError(
            f"the targets have a {kind}, which holds tensors or arrays: they would not be cut into micro-batches, and "
            "each would get those of the whole batch; give them as tensors (torch.from_numpy(…), dict(…)), or in "
            "dictionaries, lists, tuples and named tuples"
        )

    def is_list_of_samples(each: Any) -> bool:
        return (
            type(each) is list
            and len(each) == samples
            and all(isinstance(item, bool | int | float | complex | str | bytes) for item in each)
        )

    if samples is None or samples < 2:
        return
    for leaf in pytree.tree_leaves(targets, is_leaf=is_list_of_samples):
        if is_list_of_samples(leaf):
            raise PipelineError(
                f"the targets have a list of {samples} items of {type(leaf[0]).__name__}, as many as the batch has "
                "samples: it would not be cut into micro-batches, and each would get all of it; give numbers as a "
                "tensor, and what belongs to no sample as a tuple"
            )


def _holds_data(value: Any, seen: set[int]) -> bool:
    # Of the class, since dictionaries with attributes say that they have any.
    if isinstance(value, torch.Tensor) or (
        hasattr(type(value), "__array_interface__") and getattr(value, "ndim", True)
    ):
        return True
    if isinstance(value, (type, torch.nn.Module, *_PLAIN)) or callable(value) or id(value) in seen:
        return False
    seen.add(id(value))
    inside: list[Any] = list(vars(value).values()) if hasattr(value, "__dict__") else []
    inside += [getattr(value, name, None) for kind in type(value).__mro__ for name in _slots(kind)]
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inside += value
    return any(_holds_data(each, seen) for each in inside)


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)
