"""Numbers that a forward counts up in attributes: code that goes by them does something else after so many calls.

A trace sees the first call, and stages do the same for ever; and a pipeline calls forward for each micro-batch. So a
count is traced as a size is, as a symbol, and the model once more with a count for which code goes another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils import _pytree as pytree

from everstep.pipeline.frontend import modes
from everstep.pipeline.frontend.attributes import Key
from everstep.pipeline.frontend.record import ForwardRecord
from everstep.pipeline.frontend.sizes import Sizes, is_broken, symbols_of

_NEAR, _LARGEST, _OFFSET = 1_000, 1 << 30, 1 << 20
_MANY = 8  # conditions that are tried

RecordWith = Callable[[Mapping[Key, Any], Sizes], ForwardRecord]


def find_threshold(
    changed: Mapping[Key, tuple[Any, Any]], record_with: RecordWith, new_sizes: Callable[[], Sizes]
) -> tuple[Key, float] | None:
    """Find a count from which on a forward does something else.

    Args:
        changed: The attributes that a forward changes, with what they were before and after.
        record_with: Records the model with other values of attributes.
        new_sizes: Makes the symbols of one trace.

    Returns:
        The attribute and the count; None if there is none, as far as that is known.
    """
    after = {key: value for key, (_, value) in changed.items()}
    counts = {key: places for key, both in changed.items() if (places := _list_counts(*both))}
    for key, place, count in _list_candidates(after, counts, record_with, new_sizes):
        one = record_with(after, new_sizes())
        other = record_with({**after, key: _replace(after[key], place, count)}, new_sizes())
        if not modes.are_records_equal(one, other):
            return key, count
    return None


def _list_candidates(
    after: Mapping[Key, Any],
    counts: Mapping[Key, Mapping[int, float]],
    record_with: RecordWith,
    new_sizes: Callable[[], Sizes],
) -> list[tuple[Key, int, float]]:
    """Return counts for which code may go another way, with their attributes and their places in them."""
    found: list[tuple[Key, int, float]] = []
    sizes, symbols, replaced = new_sizes(), dict[Any, tuple[Key, int]](), dict(after)
    for key, places in counts.items():
        for place, now in places.items():
            if isinstance(now, float):  # as a temperature that falls, which no symbol stands for
                found += [(key, place, now * factor) for factor in (0.0, 1 / _LARGEST, float(_LARGEST))]
                continue
            made = sizes.symbol(now + _OFFSET)  # a symbol is no negative number, which a count may become
            symbols[made.node.expr] = key, place
            made = made - _OFFSET
            replaced[key] = _replace(replaced[key], place, made)
    if not symbols:
        return found
    record = record_with(replaced, sizes)
    hints = sizes.hints(sizes.hint)
    asked = [each for each in record.iterate_conditions() if not symbols_of([each]).isdisjoint(symbols)]
    for condition in list(dict.fromkeys(asked))[:_MANY]:
        for symbol in sorted(symbols_of([condition]) & symbols.keys(), key=str):
            for count in _iterate_near(hints[symbol] - _OFFSET):
                if is_broken(condition, {**hints, symbol: count + _OFFSET}):
                    found.append((*symbols[symbol], count))
                    break
    return found


def _list_counts(before: Any, after: Any) -> dict[int, float]:
    """Return the numbers in an attribute that have become others, by their places in it."""
    (old, form), (new, spec) = pytree.tree_flatten(before), pytree.tree_flatten(after)
    if form != spec:
        return {}
    pairs = enumerate(zip(old, new, strict=True))
    return {at: now for at, (was, now) in pairs if type(was) is type(now) in (int, float) and was != now and now >= 0}


def _replace(value: Any, place: int, leaf: Any) -> Any:
    leaves, spec = pytree.tree_flatten(value)
    leaves[place] = leaf
    return pytree.tree_unflatten(leaves, spec)


def _iterate_near(count: int) -> Iterator[int]:
    """Yield counts to try, those next to this one first."""
    yield from range(count + 1, count + _NEAR)
    yield from range(count - 1, -_NEAR, -1)
    further = count + _NEAR
    while further <= _LARGEST:
        yield further
        further *= 2
