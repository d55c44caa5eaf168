"""The values and gradients that wait on this rank, each for as long as somebody needs it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from everstep.pipeline.engine.nested import StageValue, ValueLayout
from everstep.pipeline.schedules.flow import Flow

Key = tuple[str, int]  # a value and a micro-batch
Gradients = list[Any]  # of each tensor of a value; None where there is none


class Values:
    """The values and gradients of one step on one rank.

    A value is dropped when the last stage here has used it and it is on its way to all other ranks that use it.
    """

    def __init__(self, flow: Flow, rank: int) -> None:
        self._flow, self._rank = flow, rank
        self._uses = {
            value: len(ranks.get(rank, ())) + (len(ranks.keys() - {rank}) if flow.placement[source] == rank else 0)
            for value, ranks in flow.users.items()
            for source in (flow.by_value[value].source,)
        }
        self._held: dict[Key, tuple[StageValue, int]] = {}
        self._gradients: dict[Key, Gradients] = {}
        self._shares: dict[Key, int] = defaultdict(int)

    def put(self, name: str, microbatch: int, value: StageValue) -> None:
        """A value that this rank has made or received."""
        self._held[name, microbatch] = value, self._uses[name]

    def has(self, name: str, microbatch: int) -> bool:
        return (name, microbatch) in self._held

    def use(self, name: str, microbatch: int) -> StageValue:
        """The value, for one of its uses."""
        value, left = self._held.pop((name, microbatch))
        if left > 1:
            self._held[name, microbatch] = value, left - 1
        return value

    def add_gradients(self, name: str, microbatch: int, gradients: Gradients) -> None:
        """The share of one user, or of all users of another rank."""
        key = name, microbatch
        known = self._gradients.get(key)
        if known is not None:
            # Not in place: the first share may be a tensor that somebody else holds.
            gradients = [_add_gradients(one, other) for one, other in zip(known, gradients, strict=True)]
        self._gradients[key] = gradients

    def take_gradients(self, name: str, microbatch: int, layout: ValueLayout) -> Gradients:
        """The sum of the shares; None for each tensor without any."""
        return self._gradients.pop((name, microbatch), None) or [None] * len(layout.specs)

    def empty(self) -> bool:
        """Tell whether all values and gradients that arrived have been used."""
        return not self._held and not self._gradients


def _add_gradients(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other
