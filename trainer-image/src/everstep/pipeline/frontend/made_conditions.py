"""Conditions on sizes that only a module knows which runs as it is: the stage that sees such a size checks them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.record import Call, ForwardRecord, Op
from everstep.pipeline.frontend.refs import Argument, ValueRef, iterate_references
from everstep.pipeline.frontend.sizes import SymbolSource, symbols_of

GIVEN = -1  # in the place of the number of a step: what a stage is given


class MadeConditions:
    """Those that one stage checks, and where it sees their sizes.

    Args:
        record: Of the model.
        given: The values of earlier stages that the stage is given.
        items: Its steps, in order.

    Attributes:
        conditions: What must hold of the symbols.
        places: Where these are, by the number of the step that gives them, or GIVEN.
    """

    def __init__(self, record: ForwardRecord, given: Iterable[int], items: Sequence[Op | Call]) -> None:
        self.conditions: list[Any] = []
        self.places: dict[int, list[SymbolSource]] = {}
        self._record, self._given, self._items = record, given, items

    def list_arguments(self) -> set[str]:
        """Return the arguments that show their symbols."""
        tensors = [place.tensor for place in self.places.get(GIVEN, ())]
        return {tensor.name for tensor in tensors if isinstance(tensor, Argument)}

    def list_values(self) -> set[int]:
        """Return the values that show their symbols."""
        tensors = [place.tensor for places in self.places.values() for place in places]
        return {tensor.index for tensor in tensors if isinstance(tensor, ValueRef)}

    def add(self, condition: Any) -> bool:
        """Add a condition if the stage sees all sizes in it, and return whether it does."""
        steps = dict.fromkeys(self._given, GIVEN)
        for number, item in enumerate(self._items):
            found = (ref.index for ref in iterate_references(item.outputs) if isinstance(ref, ValueRef))
            steps = dict.fromkeys(found, number) | steps
        places = [self._find_place(symbol, steps) for symbol in sorted(symbols_of([condition]), key=str)]
        if None in places:
            return False
        for place in places:
            number = GIVEN if isinstance(place.tensor, Argument) else steps[place.tensor.index]
            self.places.setdefault(number, []).append(place)
        self.conditions.append(condition)
        return True

    def _find_place(self, symbol: Any, steps: dict[int, int]) -> Any:
        for index, dim in self._record.made.get(symbol, ()):
            if index in steps:
                return SymbolSource(symbol, ValueRef(index), dim)
        if symbol in self._record.symbols:
            name, path, dim = self._record.symbols[symbol]
            return SymbolSource(symbol, Argument(name, path), dim)
        return None


def share_made_conditions(
    record: ForwardRecord, opened: Iterable[Call], assumed: Iterable[Any], stages: Sequence[MadeConditions]
) -> None:
    """Let the first stage that sees all sizes in a condition on what only modules know check it.

    Conditions are as they were when they came up: a size that is taken for a number is that number in all that came
    later.

    Args:
        record: Of the model.
        opened: The calls whose code a cut opens.
        assumed: What operations have assumed of such sizes and changes what stages do.
        stages: Those of all stages, in order.

    Raises:
        PipelineError: No stage sees the sizes by which the code goes.
    """
    opened = list(opened)
    # Without those of the samples, which are cut in any case.
    by_code = [
        each
        for each in dict.fromkeys(condition for call in opened for condition in call.conditions)
        if not (found := symbols_of([each])).isdisjoint(record.sizes.made) and record.sizes.batch not in found
    ]
    for condition in by_code:
        if not any(each.add(condition) for each in stages):
            raise PipelineError(
                f"the code goes by sizes that only modules know which depend on data ({condition}), and no stage is "
                "given all of what shows them: cut elsewhere"
            )
    for condition in dict.fromkeys([*assumed, *_list_equal_sizes(record)]) if opened else ():
        any(each.add(condition) for each in stages)  # or it is within a module that runs as it is


def _list_equal_sizes(record: ForwardRecord) -> Iterator[Any]:
    """The conditions that such a size is that of an argument, or 1, where operations have relied on it: they take other
    sizes too, as a slice does."""
    for symbol in record.sizes.made:
        now = record.sizes.simplify(symbol)
        alike = next((each for each in record.symbols if record.sizes.simplify(each) == now), None)
        if now == 1:
            yield sympy.Eq(symbol, 1)
        elif alike is not None and not isinstance(now, int):
            yield sympy.Eq(symbol, alike)
