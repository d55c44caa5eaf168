"""Find what a trace has assumed of sizes beside what the model's code asks.

Torch takes a slice for all of a short tensor, gives as many parts as there are, and drops dimensions of size 1; and a
module that runs as it is may do as it likes. Where all that follows runs the same for other sizes, such an assumption
means nothing. To know it, the model is traced with sizes that break it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import sympy
from torch.utils import _pytree as pytree

from everstep.pipeline.frontend.fixed_sizes import Assumption
from everstep.pipeline.frontend.record import Call, ForwardRecord, Op, SizePlace
from everstep.pipeline.frontend.refs import (
    Constant,
    Shape,
    Size,
    Slice,
    Template,
    ValueRef,
    is_reference,
    iterate_references,
)
from everstep.pipeline.frontend.sizes import evaluate_size, is_broken, symbols_of

_LARGEST = 1 << 20
_EXPANDING = {"expand", "expand_as", "broadcast_to"}  # of one tensor, as it is where it has that shape

RecordWith = Callable[[Mapping[SizePlace, int], Mapping[int, int]], ForwardRecord]


def find_assumptions(
    record: ForwardRecord, opened: Collection[str], record_with: RecordWith
) -> tuple[tuple[Assumption, ...], tuple[Any, ...]]:
    """Find what was assumed of sizes and changes what the stages do: of those of arguments, and conditions in which
    there are some that only modules know.

    Args:
        record: Of the model with the example.
        opened: The paths of the modules whose code a cut may open.
        record_with: Records the model with other sizes of its arguments, and of what only modules know the size of, by
            its number in `Sizes.made`.
    """
    inside = [each for call in record.root.all_calls() if call.path not in opened for each in call.conditions]
    asked = [each for call in record.root.all_calls() if call.path in opened for each in call.conditions]
    numbers = {each.lhs: each.rhs for each in asked if isinstance(each, sympy.Eq) and each.rhs.is_Integer}
    tried: dict[frozenset[Any], bool] = {}
    assumed: dict[Any, Any] = {}  # numbers of sizes, by what was found
    found, of_made = list[Assumption](), list[Any]()
    known = {*record.symbols, *record.sizes.made}
    for condition in dict.fromkeys([*record.sizes.assumed, *inside]):
        symbols = sorted(symbols_of([condition]), key=str)
        if not symbols or any(symbol not in known for symbol in symbols):
            continue  # of the samples, which are cut in any case
        if condition.xreplace(assumed) == sympy.true:
            continue  # as what a loop over a tensor assumes of each of its parts
        others = _break(condition, symbols, record)
        if not others:
            continue
        key = frozenset(others.items())
        if condition.xreplace(numbers) == sympy.true:
            tried[key] = True  # a loop takes other steps: a trace for each would show no more
        if key not in tried:
            tried[key] = _is_other(record, opened, record_with, others)
        if tried[key] and isinstance(condition, sympy.Eq) and condition.rhs.is_Integer:
            assumed[condition.lhs] = condition.rhs
        if tried[key] and record.symbols.keys() >= set(symbols):
            found.append(Assumption(condition, tuple((symbol, record.symbols[symbol]) for symbol in symbols)))
        elif tried[key]:
            of_made.append(condition)
    return tuple(found), tuple(of_made)


def _break(condition: Any, symbols: Collection[Any], record: ForwardRecord) -> dict[Any, int]:
    """Return sizes for which a condition does not hold, of all symbols that are one size; none if there are none.

    They are next to the nearest ones, where they can be: a slice of six of six is that of a longer tensor, too.
    """
    hints = record.sizes.hints(record.sizes.hint)
    for symbol in symbols:
        now = record.sizes.simplify(symbol)
        alike = [each for each in (*record.symbols, *record.sizes.made) if record.sizes.simplify(each) == now]
        alike = [symbol] if isinstance(now, int) and symbol in record.sizes.made else alike

        def holds(size: int, alike: Collection[Any] = alike) -> bool:
            return not is_broken(condition, {**hints, **dict.fromkeys(alike, size)})

        for last in (_LARGEST, 1):
            good, bad = hints[symbol], hints[symbol]
            while holds(bad) and bad != last:
                good, bad = bad, min(2 * bad, last) if last > 1 else max(bad // 2, last)
            if holds(bad):
                continue
            while abs(good - bad) > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if holds(middle) else (good, middle)
            further = max(2 * bad - good, 1)
            return dict.fromkeys(alike, bad if holds(further) else further)
    return {}


def _is_other(
    record: ForwardRecord, opened: Collection[str], record_with: RecordWith, others: Mapping[Any, int]
) -> bool:
    """Tell whether a trace with other sizes does something else, as far as that is known."""

    def compare(sizes: Mapping[Any, int]) -> bool:
        places = {record.symbols[symbol]: size for symbol, size in sizes.items() if symbol in record.symbols}
        made = {number: sizes[symbol] for number, symbol in enumerate(record.sizes.made) if symbol in sizes}
        second = record_with(places, made)
        return _Comparison(record, second, opened, sizes).is_same()

    try:
        return not compare(others) and compare({})  # what differs each time shows nothing
    except Exception:
        # The model does not take these sizes in one process either; of those that modules make it may not look so.
        return any(symbol in record.sizes.made for symbol in others)


def forget_single_samples(
    record: ForwardRecord, opened: Collection[str], record_one: Callable[[], ForwardRecord]
) -> None:
    """Forget the conditions of code that a cut may open which one sample alone breaks, where the model does the same
    for it: transformers expand positions where there are more samples than one.

    Args:
        record: Of the model with the example.
        opened: The paths of the modules whose code a cut may open.
        record_one: Records the model with one sample.
    """
    batch = record.sizes.batch

    def is_of_one(condition: Any) -> bool:
        if symbols_of([condition]) != {batch}:
            return False
        return [samples for samples in range(1, record.sizes.hint) if is_broken(condition, {batch: samples})] == [1]

    calls = [call for call in record.root.all_calls() if call.path in opened]
    found = {condition for call in calls for condition in call.conditions if is_of_one(condition)}
    if not found:
        return
    try:
        if not _Comparison(record, record_one(), opened, {}).is_same():
            return
    except Exception:
        return  # the model does not take one sample in one process either
    for call in calls:
        call.conditions = [each for each in call.conditions if each not in found]


class _Differ(Exception):
    """Two records do not match."""


class _Comparison:
    """Compares a record with that of other sizes, with numbers in the place of expressions."""

    def __init__(
        self, one: ForwardRecord, other: ForwardRecord, opened: Collection[str], sizes: Mapping[Any, int]
    ) -> None:
        self._one, self._other, self._opened = one, other, opened
        samples = other.sizes.hint
        self._own = other.sizes.hints(samples)
        self._hints = {**one.sizes.hints(samples), **sizes}
        self._values: dict[int, set[int]] = {}  # of `other` to those of `one`
        self._same: dict[tuple[ForwardRecord, int], int] = {}  # what an operation left as it was, and what that was
        self._computes = self._has_other_shape = False

    def is_same(self) -> bool:
        """Tell whether both do the same, and the shapes from which stages read sizes are those that they expect."""
        try:
            self._call(self._one.root, self._other.root)
        except _Differ:
            return False
        return not (self._computes and self._has_other_shape)

    def _call(self, one: Call, other: Call) -> None:
        self._inputs(one.inputs, other.inputs)
        runs_as_it_is = one.path and one.path not in self._opened and one.outputs is not None
        if not runs_as_it_is or other.outputs is None:
            items, others = (
                self._list_items(one, self._one, self._hints),
                self._list_items(other, self._other, self._own),
            )
            if len(items) != len(others):
                raise _Differ
            for a, b in zip(items, others, strict=True):
                if isinstance(a, Call) and isinstance(b, Call) and a.path == b.path:
                    self._call(a, b)
                elif isinstance(a, Op) and isinstance(b, Op) and a.name == b.name:
                    self._inputs(a.inputs, b.inputs)
                    self._outputs(a.outputs, b.outputs)
                else:
                    raise _Differ
        self._outputs(one.outputs, other.outputs)

    def _list_items(self, call: Call, record: ForwardRecord, sizes: Mapping[Any, int]) -> list[Op | Call]:
        """Return what a call does, without operations that leave a tensor as it is where sizes are these."""

        def shape(index: int) -> list[Any]:
            return [evaluate_size(size, sizes) for size in record.values[index].shape]

        found = list[Op | Call]()
        for item in call.body:
            given = next(iterate_references(item.inputs), None) if isinstance(item, Op) else None
            made = item.outputs
            if (
                isinstance(item, Op)
                and item.name in _EXPANDING
                and isinstance(given, ValueRef)
                and isinstance(made, ValueRef)
                and shape(given.index) == shape(made.index)
            ):
                self._same[record, made.index] = self._same.get((record, given.index), given.index)
                self._computes = self._computes or any(map(_has_size, pytree.tree_leaves(item.inputs)))
            else:
                found.append(item)
        return found

    def _inputs(self, one: Template, other: Template) -> None:
        for left, right in self._pairs(one, other):
            self._computes = self._computes or _has_size(left)
            if isinstance(left, ValueRef) and isinstance(right, ValueRef):
                if self._find(self._one, left) not in self._values.get(self._find(self._other, right), ()):
                    raise _Differ
            elif isinstance(left, Constant) and isinstance(right, Constant):
                if self._one.constants[left.index] is not self._other.constants[right.index]:
                    raise _Differ
            elif not _is_equal(_resolve(left, self._hints), _resolve(right, self._own)):
                raise _Differ

    def _outputs(self, one: Template, other: Template) -> None:
        for left, right in self._pairs(one, other):
            if isinstance(left, ValueRef) and isinstance(right, ValueRef):
                known = self._values.setdefault(self._find(self._other, right), set())
                known.add(self._find(self._one, left))
                shape = [evaluate_size(size, self._hints) for size in self._one.values[left.index].shape]
                own = [evaluate_size(size, self._own) for size in self._other.values[right.index].shape]
                self._has_other_shape = self._has_other_shape or shape != own
            else:
                self._computes = self._computes or _has_size(left)
                if not _is_equal(_resolve(left, self._hints), _resolve(right, self._own)):
                    raise _Differ

    def _find(self, record: ForwardRecord, value: ValueRef) -> int:
        """Return the number of the value that this one is the same as."""
        return self._same.get((record, value.index), value.index)

    def _pairs(self, one: Template, other: Template) -> list[tuple[Any, Any]]:
        (a, spec), (b, other_spec) = pytree.tree_flatten(one), pytree.tree_flatten(other)
        if spec != other_spec:
            raise _Differ
        return list(zip(a, b, strict=True))


def _has_size(leaf: Any) -> bool:
    if isinstance(leaf, Slice):
        return any(map(_has_size, (leaf.start, leaf.stop, leaf.step)))
    return isinstance(leaf, Size) or (isinstance(leaf, Shape) and any(map(_has_size, leaf.parts)))


def _resolve(leaf: Any, values: Mapping[Any, int]) -> Any:
    if isinstance(leaf, Size):
        return evaluate_size(leaf.expr, values)
    if isinstance(leaf, Slice | slice):
        return tuple(_resolve(each, values) for each in (leaf.start, leaf.stop, leaf.step))
    if isinstance(leaf, Shape):
        return tuple(_resolve(each, values) for each in leaf.parts)
    return leaf


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if is_reference(one) or is_reference(other) or isinstance(one, tuple):
        return bool(one == other)
    return (isinstance(one, int | float) and isinstance(other, int | float) and one == other) or (
        type(one) is type(other) and bool(one == other)
    )
