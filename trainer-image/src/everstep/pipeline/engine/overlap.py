"""Reductions that begin while the last backward of a stage still runs, as in DDP (arXiv 2006.15704).

A bucket is reduced as soon as the gradients in it are complete, if those before it are under way: all replicas reduce
the same buckets in the same order, and only when they begin is each replica's own. A gradient is complete when autograd
has added to it, or cannot reach it. More may come even so where a function written in Python goes backward by itself,
as reentrant activation checkpoints do, and uses a parameter that others use too: what comes late is summed once more,
after the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.autograd.function import BackwardCFunction

from everstep.pipeline.schedules import Action, ActionKind
from everstep.pipeline.schedules.flow import LAST


class BucketQueue:
    """The buckets of one stage in one step, in the order in which all replicas reduce them.

    The last one always waits for `start_rest`: it says of all others which gradients have come late.

    Args:
        buckets: Parameters of each bucket.
        start: Begins to reduce a bucket; with the last one it gets the parameters of all others.
    """

    def __init__(self, buckets: Sequence[list[Any]], start: Callable[[list[Any], Sequence[Any]], None]) -> None:
        self._buckets, self._start, self._begun = list(buckets), start, 0
        self._missing = [set(bucket) for bucket in self._buckets]
        self._early = [parameter for bucket in self._buckets[:-1] for parameter in bucket]
        self._place = {parameter: place for place, bucket in enumerate(self._buckets) for parameter in bucket}

    @contextlib.contextmanager
    def listen(self, nodes: Sequence[Any]) -> Iterator[None]:
        """Start buckets as their gradients are completed by a backward that runs inside.

        Args:
            nodes: Those of the graph at which that backward begins.
        """
        if len(self._buckets) < 2:
            yield
            return
        reached, is_known = _survey_leaves(nodes)
        hooks = []
        try:
            for parameter in self._early:
                hooks.append(parameter.register_post_accumulate_grad_hook(self._complete))
                if is_known and parameter not in reached:
                    self._complete(parameter)
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def start_rest(self) -> None:
        """Start what is left: all gradients are there."""
        while self._begun < len(self._buckets):
            self._next()

    def _complete(self, parameter: Any) -> None:
        self._missing[self._place[parameter]].discard(parameter)
        while self._begun < len(self._buckets) - 1 and not self._missing[self._begun]:
            self._next()

    def _next(self) -> None:
        bucket, is_last = self._buckets[self._begun], self._begun == len(self._buckets) - 1
        self._begun += 1
        self._start(bucket, self._early if is_last else ())


def last_backwards(actions: Iterable[Action]) -> frozenset[Action]:
    """Return the last backward of each stage that may start the stage's reduction.

    It may not where another reduction stands between the two: replicas with fewer micro-batches have other last
    backwards, and would begin their reductions in another order.

    Args:
        actions: Those of one rank for one batch.
    """
    found, last, since = list[Action](), dict[int, Action](), set[int]()
    for action in actions:
        if action.kind in LAST:
            last[action.stage] = action
            since.add(action.stage)
        elif action.kind in (ActionKind.REDUCE, ActionKind.TIE):
            if action.kind is ActionKind.REDUCE and action.stage in since:
                found.append(last[action.stage])
            since.clear()
    return frozenset(found)


def _survey_leaves(nodes: Sequence[Any]) -> tuple[set[Any], bool]:
    """Return the leaves that a backward from these nodes reaches, and whether it is known that there are no others."""
    seen, stack = set(nodes), list(nodes)
    leaves, is_known = set[Any](), True
    while stack:
        node = stack.pop()
        is_known = is_known and not isinstance(node, BackwardCFunction)
        if not node.next_functions and (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return leaves, is_known
