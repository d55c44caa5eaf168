"""Few settings in which every two choices meet."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows that have one choice of each factor, so that each pair of choices of two factors is in one of them.

    Each row begins with a pair that no row has yet, and takes of every other factor what adds most. Always the same.
    """
    missing = dict.fromkeys(pairs_of(factors))
    draw = random.Random(0)
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name, choices in factors.items():
            if name not in row:
                counts = [sum(_pair(name, choice, *item) in missing for item in row.items()) for choice in choices]
                row[name] = draw.choice([c for c, count in zip(choices, counts, strict=True) if count == max(counts)])
        rows.append(row)
        for one, other in combinations(row.items(), 2):
            missing.pop(_pair(*one, *other), None)
    return rows


def pairs_of(factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    """All pairs of choices of two factors."""
    return [
        _pair(one, mine, other, theirs)
        for one, other in combinations(factors, 2)
        for mine in factors[one]
        for theirs in factors[other]
    ]


def _pair(one: str, mine: Any, other: str, theirs: Any) -> Pair:
    return ((one, mine), (other, theirs)) if one < other else ((other, theirs), (one, mine))
