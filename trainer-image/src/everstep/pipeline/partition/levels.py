"""The least of `f(level) + weight · level` for a falling f that is dear to ask, with a bound that holds at any time."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

S = TypeVar("S")


@dataclass(frozen=True)
class Found(Generic[S]):
    """`cost`: f, of `solution`, which needs no more than `level`; `bound`: what f at this level is at least."""

    cost: float
    bound: float
    level: float
    solution: S


@dataclass(frozen=True)
class Least(Generic[S]):
    """All that was found on the way, best first, and what no level can be below."""

    found: tuple[tuple[float, S], ...]
    bound: float


def find_least(
    levels: Sequence[float],
    ask: Callable[[float], Found[S] | None],
    weight: float,
    *,
    tolerance: float,
    most: int,
) -> Least[S]:
    """`levels`: all that can be the answer's, ascending. `ask(level)`: the best with no more than it; None if there is
    none. Ends when the best is within `tolerance` (relative) of the bound, or after `most` questions.

    Branch and bound over intervals of levels: f is nowhere in one below its value at the upper end.
    """
    found: list[tuple[float, S]] = []
    best = closed = inf
    asked = 0
    # bound of the interval, its ends as indices, what f is at least in it
    open_: list[tuple[float, int, int, float]] = []

    def visit(low: int, middle: int, high: int, floor: float) -> None:
        nonlocal best, closed, asked
        asked += 1
        answer = ask(levels[middle])
        if middle < high:
            heapq.heappush(open_, (floor + weight * levels[middle + 1], middle + 1, high, floor))
        if answer is None:
            return
        cost = answer.cost + weight * answer.level
        found.append((cost, answer.solution))
        best = min(best, cost)
        closed = min(closed, answer.bound + weight * answer.level)  # from the answer's level to the one asked
        floor = max(floor, answer.bound)
        below = _find_level_below(levels, answer.level, middle)
        if low <= below:
            heapq.heappush(open_, (floor + weight * levels[low], low, below, floor))

    if levels:
        visit(0, len(levels) - 1, len(levels) - 1, -inf)
        if open_ and asked < most:
            _, low, high, floor = heapq.heappop(open_)
            visit(low, low, high, floor)
    while open_ and asked < most and open_[0][0] < best - tolerance * abs(best):
        _, low, high, floor = heapq.heappop(open_)
        visit(low, (low + high) // 2, high, floor)
    bound = min(best, closed, open_[0][0] if open_ else inf)
    return Least(tuple(sorted(found, key=lambda each: each[0])), bound)


def _find_level_below(levels: Sequence[float], level: float, high: int) -> int:
    """The last index up to `high` whose level is below `level`."""
    return bisect_left(levels, level, 0, high + 1) - 1
