"""Sizes of arguments that a model's code takes for numbers, by int(), float(), len(), math or a loop, or an operation
as linspace(): what follows from them is in the trace, and batches of other sizes would be given what follows from the
example's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.record import FIXES_SIZES, ForwardRecord, SizePlace
from everstep.pipeline.frontend.refs import Size, iterate_references
from everstep.pipeline.frontend.sizes import is_broken, symbols_of

_INSTEAD = (
    "pad all batches to the example's sizes, compute with x.shape[1] itself instead of int(), float(), len(), math or "
    "a loop over it, or move that code into a module that has no modules inside, which is never cut"
)


@dataclass(frozen=True)
class Assumption:
    """A condition on sizes without which the stages would do something else. `places`: where its symbols are."""

    condition: Any
    places: tuple[tuple[Any, SizePlace], ...]

    def check(self, named: Mapping[str, Any]) -> None:
        """PipelineError if the arguments have sizes for which it does not hold."""
        sizes = {symbol: _get_size(named, place) for symbol, place in self.places}
        known = {symbol: size for symbol, size in sizes.items() if size is not None}
        if len(known) < len(sizes) or not is_broken(self.condition, known):
            return
        words = {symbol: sympy.Symbol(f"size{number or ''}") for number, symbol in enumerate(sizes)}
        which = ", ".join(f"{_describe(place)} is {sizes[symbol]}" for symbol, place in self.places)
        raise PipelineError(
            f"{which}: with this size, slices or parts of tensors in the model have other sizes than with the "
            f"example's, and its code computes with those. The stages are made for {self.condition.xreplace(words)}: "
            "pad or cut all batches so that this holds, call pipeline() with an example of these sizes, or move the "
            "code that computes with them into a module that has no modules inside, which is never cut"
        )


@dataclass(frozen=True)
class FixedSizes:
    """The sizes that are fixed. `numbers`: dimensions that have one size; `pairs`: those that have equal sizes;
    `assumptions`: what holds of others; `made`: conditions with sizes that only modules know."""

    numbers: tuple[tuple[SizePlace, int], ...] = ()
    pairs: tuple[tuple[SizePlace, SizePlace], ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    made: tuple[Any, ...] = ()

    def without(self, places: Collection[SizePlace]) -> FixedSizes:
        """Return the rest, where any other size is as right in these places."""
        return replace(self, numbers=tuple(each for each in self.numbers if each[0] not in places))

    def check(self, named: Mapping[str, Any]) -> None:
        """Compare the sizes of a batch, by the names of arguments, with those that are fixed.

        Args:
            named: What the model is called with; sizes of what is not there are another process's to look at.

        Raises:
            PipelineError: If one is another; it names the argument and both sizes.
        """
        for place, size in self.numbers:
            now = _get_size(named, place)
            if now is not None and now != size:
                raise PipelineError(
                    f"{_describe(place)} is {now}, and was {size} in the example: the model's code, or an operation "
                    f"in it, takes this size for a number, so that the stages have what follows from {size}; {_INSTEAD}"
                )
        for one, other in self.pairs:
            sizes = _get_size(named, one), _get_size(named, other)
            if None not in sizes and sizes[0] != sizes[1]:
                raise PipelineError(
                    f"{_describe(one)} is {sizes[0]}, and {_describe(other)} is {sizes[1]}: they were equal in the "
                    "example, and the model's code relies on that; give pipeline() an example in which they differ"
                )
        for assumption in self.assumptions:
            assumption.check(named)


def find_fixed_sizes(record: ForwardRecord) -> FixedSizes:
    """Find the sizes that this forward has fixed, each or to each other.

    Also those that an operation of torch has fixed, as a layer its features: some take others when they run, as
    `linspace` any number of steps, and all take 1 where they broadcast.
    """
    numbers, pairs = [], []
    for symbol, place in record.symbols.items():
        found = record.sizes.simplify(symbol)
        if isinstance(found, int):
            numbers.append((place, found))
        elif found != symbol and found in record.symbols:
            pairs.append((place, record.symbols[found]))
    return FixedSizes(tuple(numbers), tuple(pairs))


def are_free(
    record: ForwardRecord,
    again: Callable[[Mapping[str, str]], ForwardRecord],
    opened: Collection[str],
    places: Collection[SizePlace],
) -> bool:
    """Tell whether the code that a cut may open asks and computes nothing of the sizes in these places.

    Args:
        record: Of the model.
        again: Records it once more, without looking into the modules that it is given, by path, with the reason: those
            that take sizes for numbers, which they else would be behind it, where nobody sees what code asks.
        opened: The paths of the modules whose code a cut may open.
        places: The places.
    """
    record = _record_unfixed(record, again, opened)
    symbols = {symbol for symbol, place in record.symbols.items() if place in places}
    if any(record.sizes.simplify(symbol) != symbol for symbol in symbols):
        return False
    calls = [call for call in record.root.all_calls() if call.path in opened]
    asked = [*record.sizes.assumed, *(condition for call in calls for condition in call.conditions)]
    items = [item for call in calls for item in (call, *call.body)]
    taken = [ref for item in items for ref in (*iterate_references(item.inputs), *iterate_references(item.outputs))]
    sizes = [record.sizes.simplify(ref.expr) for ref in taken if isinstance(ref, Size)]
    return symbols.isdisjoint(symbols_of([*asked, *sizes]))


def _record_unfixed(
    record: ForwardRecord, again: Callable[[Mapping[str, str]], ForwardRecord], opened: Collection[str]
) -> ForwardRecord:
    # A size that one module takes is a number for all behind it, which show only later that they take it, too.
    unseen = dict[str, str]()
    while True:
        closed = [call for call in record.root.all_calls() if call.path not in opened]
        unseen |= {call.path: FIXES_SIZES for call in closed if call.fixes}
        record = again(unseen)
        if not any(call.fixes and call.path not in {*opened, *unseen} for call in record.root.all_calls()):
            return record


def group_places(record: ForwardRecord, arguments: Mapping[str, Any], number: int) -> list[list[SizePlace]]:
    """Return the places of all sizes that are equal to a number, and then those of each dimension: a length and the
    features, of which only one may change, can be equal by chance.

    Args:
        record: Of the model.
        arguments: The example's.
        number: The size.
    """
    places = [place for place in record.symbols.values() if _get_size(arguments, place) == number]
    by_dimension = [[place for place in places if place[2] == dim] for dim in sorted({place[2] for place in places})]
    return [places, *(by_dimension if len(by_dimension) > 1 else [])]


def with_sizes(arguments: Mapping[str, Any], sizes: Mapping[SizePlace, int]) -> dict[str, Any]:
    """Return arguments without data, of other sizes.

    Args:
        arguments: The example's.
        sizes: The sizes by their places; all others are the example's.
    """

    def other(value: Any, name: str, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            return type(value)({key: other(each, name, (*path, key)) for key, each in value.items()})
        if isinstance(value, list | tuple):
            items = [other(each, name, (*path, at)) for at, each in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if not isinstance(value, torch.Tensor):
            return value
        shape = [sizes.get((name, path, dim), size) for dim, size in enumerate(value.shape)]
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return {name: other(value, name, ()) for name, value in arguments.items()}


def _get_size(named: Mapping[str, Any], place: SizePlace) -> int | None:
    name, path, dim = place
    found = named.get(name)
    for key in path:
        if found is None:
            return None
        found = found[key]
    return int(found.shape[dim]) if isinstance(found, torch.Tensor) and found.dim() > dim else None


def _describe(place: SizePlace) -> str:
    name, path, dim = place
    return f"dimension {dim} of the argument {name + ''.join(f'[{key!r}]' for key in path)!r}"
