"""The types, the numbers of dimensions and the sizes of what modules return, which the code around them goes by.

A module that runs as it is may return something else than in the trace, by its data, or by an attribute that a script
has changed since. Code around it was traced with what it returned then, and computes with sizes of arguments that its
result had.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.record import Call, ForwardRecord
from everstep.pipeline.frontend.refs import Argument, Frame, Size, ValueRef, iterate_references
from everstep.pipeline.frontend.sizes import are_sizes_visible, evaluate_size, find_places, solve_sizes, symbols_of


def find_used_symbols(record: ForwardRecord, opened: Collection[str]) -> frozenset[Any]:
    """Return the sizes by which code goes, or with which it computes, that a cut may open.

    Args:
        record: Of the model.
        opened: The paths of the modules whose code a cut may open.
    """
    calls = [call for call in record.root.all_calls() if call.path in opened]
    templates = [each for call in calls for item in (call, *call.body) for each in (item.inputs, item.other)]
    sizes = [ref.expr for each in templates for ref in iterate_references(each) if isinstance(ref, Size)]
    asked = [*sizes, *(condition for call in calls for condition in call.conditions)]
    return frozenset(symbols_of([*asked, *(record.sizes.simplify(each) for each in asked if symbols_of([each]))]))


class ResultKinds:
    """The kinds of what one call of a module returns.

    Args:
        record: Of the model.
        call: The call.
        used: The sizes with which code computes that a cut may open.
        put: Puts the tensors of its result into a frame.
    """

    def __init__(
        self, record: ForwardRecord, call: Call, used: Collection[Any], put: Callable[[Any, Frame], None]
    ) -> None:
        self._name, self._module, self._training, self._put = call.name, call.module, call.training, put
        self._is_cast = not any(each.opaque for each in call.all_calls())
        given: dict[Any, Any] = {}
        for ref in iterate_references(call.inputs):
            if isinstance(ref, ValueRef):
                given[ref] = record.values[ref.index].shape
            elif isinstance(ref, Argument):
                given[ref] = record.arguments[ref.name][ref.path].shape
        made = dict.fromkeys(ref.index for ref in iterate_references(call.outputs) if isinstance(ref, ValueRef))
        self._kinds = {each: (record.values[each].dtype, len(record.values[each].shape)) for each in made}
        self._sizes: dict[tuple[int, int], Any] = {}
        for index in made:
            for dim, made_as in enumerate(record.values[index].shape):
                size = made_as if isinstance(made_as, int) else record.sizes.simplify(made_as)
                symbols = symbols_of([size])
                # Nothing is around the model itself.
                if call.path and not symbols.isdisjoint(used) and are_sizes_visible(symbols, given):
                    self._sizes[index, dim] = size
        self._places = find_places(symbols_of(self._sizes.values()), given) if self._sizes else []
        self._known: dict[tuple[int, ...], Mapping[tuple[int, int], int]] = {}

    def put(self, result: Any, frame: Frame) -> None:
        """Put the tensors of a result into a frame.

        Raises:
            PipelineError: One is of another type, number of dimensions or size than the code around was traced with.
        """
        self._put(result, frame)
        if self._module.training != self._training:
            return
        for index, (dtype, dims) in self._kinds.items():
            tensor = frame.values[index]
            if tensor.dim() != dims or (tensor.dtype != dtype and not self._may_be_cast()):
                raise PipelineError(
                    f"module {self._name!r} returned a tensor of {tensor.dtype} with {tensor.dim()} dimensions, and of "
                    f"{dtype} with {dims} when pipeline() was called: the code around it was traced with that, and "
                    "may go by it: let it return tensors of one type and number of dimensions"
                )
        if not self._sizes:
            return
        for (index, dim), wanted in self._compute_sizes(frame).items():
            if (size := frame.values[index].shape[dim]) != wanted:
                raise PipelineError(
                    f"module {self._name!r} returned a tensor whose dimension {dim} is {size}, and with what it was "
                    f"given it was to be {wanted} when pipeline() was called: the code around it was traced with that, "
                    "and computes with sizes: let the code that computes with this one be in the same module, and "
                    "change what decides on it before the call of pipeline()"
                )

    def _may_be_cast(self) -> bool:
        """Tell whether a script has casting around what it calls, which torch's own modules follow."""
        return self._is_cast and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled())

    def _compute_sizes(self, frame: Frame) -> Mapping[tuple[int, int], int]:
        shapes = {place.tensor: _get_shape(place.tensor, frame) for place in self._places}
        key = tuple(shapes[place.tensor][place.dim] for place in self._places)
        if key not in self._known:
            symbols = solve_sizes(self._places, shapes)
            self._known[key] = {place: int(evaluate_size(size, symbols)) for place, size in self._sizes.items()}
        return self._known[key]


def _get_shape(ref: Any, frame: Frame) -> torch.Size:
    found = frame.values[ref.index] if isinstance(ref, ValueRef) else frame.arguments[ref.name]
    for key in ref.path if isinstance(ref, Argument) else ():
        found = found[key]
    shape: torch.Size = found.shape
    return shape
