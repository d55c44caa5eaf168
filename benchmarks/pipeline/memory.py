"""Rows `memory-*`: the most bytes of saved activations at any time in a step, against what the schedule says.

Nothing is timed: saved-tensor hooks count the bytes of storages that autograd keeps while each rank runs its part of a
step, other than parameters and the batch, which are there anyway. The bound is the schedule's, of what one micro-batch
keeps in each stage, as a plan counts it. Rows `memory-*-bf16` are under autocast: a rank then keeps narrow copies of
its weights too, once for all micro-batches.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.interval import Interval
from benchmarks.pipeline.chain import CHUNKS, ChainStage, ChainWork, engine, loss

PRECISIONS = {"full": "", "bf16": "-bf16"}  # and what rows are called by it


def rows(wanted: Collection[str]) -> Iterator[Interval]:
    for name in CHUNKS:
        for precision, kind in PRECISIONS.items():
            if {"memory", f"memory-{name}{kind}"} & set(wanted):
                yield row(ChainWork(name, ranks=4, microbatches=8, width=32, rows=16, layers=8, precision=precision))


def row(work: ChainWork) -> Interval:
    from everstep.pipeline.graph import Stage, make_chain_graph
    from everstep.pipeline.schedules import compute_peak_memory
    from tests.pipeline.inprocess import Fabric, InProcess

    batch = work.batch()
    each, casts = _of_one(work)
    bound = list(
        compute_peak_memory(work.order, make_chain_graph([replace(Stage(), activation=size) for size in each]))
    )
    for stage, at in enumerate(work.order.placement):
        bound[at] += casts[stage]

    def rank(transport: InProcess) -> int:
        own = work.order.stages_of(transport.rank)
        made = engine(work, transport, {stage: work.module(stage) for stage in own})
        first, last = 0 in own, work.stages - 1 in own
        kept = Kept([*made.parameters.own, batch])
        for _ in range(2):
            # Of the second step: autocast's copies are one cache of all threads, and in its first forward each rank
            # drops those that others may have made.
            kept.peak = 0
            with kept.counting():
                made.step({"x": batch} if first else None, batch if last else None)
        return kept.peak

    found = Fabric(work.ranks).run(rank)
    # The worst rank is the one that is furthest above its own bound.
    worst = max(range(work.ranks), key=lambda index: found[index] / bound[index])
    result = Interval(f"memory-{work.schedule}{PRECISIONS[work.precision]}", "B", 1.0)
    result.samples = {"ours": [float(found[worst])], "floor": [float(bound[worst])]}
    result.samples["ranks"] = [size / most for size, most in zip(found, bound, strict=True)]
    return result


def _of_one(work: ChainWork) -> tuple[list[int], list[int]]:
    """Return what one micro-batch keeps in each stage, in the last one with its loss; and what all keep together."""
    import torch

    from everstep.pipeline.profile import WithLoss, look_at

    batch = work.batch()[: work.rows]
    values, activations, casts = {"input:x": batch}, list[int](), list[int]()
    with torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "bf16"):
        for stage in range(work.stages):
            part: Any = ChainStage(stage, work.stages, work.module(stage))
            if stage == work.stages - 1:
                part = WithLoss(part, partial(loss, target=batch))
            # The batch is there anyway; a value that was sent is in memory of the rank that receives it.
            values, cost = look_at(part, values, {_storage(batch)})
            torch.clear_autocast_cache()
            activations.append(cost.activation)
            casts.append(cost.cast)
    return activations, casts


class Kept:
    """Counts the bytes of each storage while any graph of this thread holds it."""

    def __init__(self, others: list[Any]) -> None:
        self._others = {_storage(each) for each in others}
        self._held: Counter[int] = Counter()
        self._bytes = 0
        self.peak = 0

    def counting(self) -> AbstractContextManager[None]:
        import torch

        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda held: held.tensor
        )
        return hooks

    def _pack(self, tensor: Any) -> _Held:
        held = _Held(tensor.detach())  # a graph that holds its own results is never freed
        key, size = _storage(tensor), tensor.untyped_storage().nbytes()
        if key not in self._others:
            self._held[key] += 1
            if self._held[key] == 1:
                self._bytes += size
                self.peak = max(self.peak, self._bytes)
            weakref.finalize(held, self._gone, key, size)
        return held

    def _gone(self, key: int, size: int) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            self._bytes -= size


class _Held:
    """A tensor that a graph holds."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)
