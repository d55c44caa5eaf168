"""Planning with many ranks, in one process: what each rank would send, and what rank 0 makes of it.

Layouts are those of a transformer of `blocks` blocks with Adam: replicas as under DDP, shards of the first dimension as
under FSDP2, both as under HSDP, and the counters of steps that every rank has whole.
"""

from __future__ import annotations

import time
import tracemalloc
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, get_args

import numpy as np

from benchmarks.interval import REPEATS, Interval
from everstep.checkpoint.save.layouts import LayoutNames, Ownership, RankLayout
from everstep.checkpoint.save.plan_coordinator import PlanCoordinator, PlanShare, RankMessages

Spread = Literal["ddp", "fsdp", "hsdp"]

SHARD_REPLICAS = 8  # of each shard under HSDP
_BLOCK = {"qkv": (3072, 1024), "out": (1024, 1024), "up": (4096, 1024), "down": (1024, 4096), "norm": (1024,)}


@dataclass(frozen=True)
class Planned:
    """The cost of a simulated planning. `seconds` of processor time and `peak_bytes` are those of rank 0; `sent`
    are the bytes of all messages to rank 0, `answered` those from it."""

    shares: tuple[PlanShare, ...]
    layouts: tuple[RankLayout, ...]
    seconds: float
    peak_bytes: int
    sent: int
    answered: int


def rows() -> Iterator[Interval]:
    """Processor time of rank 0 for 512 ranks with 2,200 tensors each."""
    for spread in get_args(Spread):
        layouts = tuple(layout_of_rank(spread, rank, 512, 2200) for rank in range(512))
        seconds = [plan_ranks(layouts).seconds for _ in range(1 + REPEATS)][1:]
        yield Interval(f"plan-{spread}", "s", 2.0, {"ours": seconds}, absolute=True)


def tensors_of_model(count: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """So many tensors: of each parameter itself, two moments and a counter."""
    number = 0
    while True:
        for kind, shape in _BLOCK.items():
            name = f"blocks.{number}.{kind}.weight"
            yield f"model.{name}", "bfloat16", shape
            yield f"optimizer.state.{name}.exp_avg", "float32", shape
            yield f"optimizer.state.{name}.exp_avg_sq", "float32", shape
            yield f"optimizer.state.{name}.step", "float32", ()
        number += 1
        if 4 * number * len(_BLOCK) >= count:
            return


def layout_of_rank(spread: Spread, rank: int, world: int, count: int) -> RankLayout:
    """Return what a rank holds of a model with so many tensors (a multiple of 20)."""
    names = _names_of_model(count)
    shards = {"ddp": 1, "fsdp": world, "hsdp": max(1, world // SHARD_REPLICAS)}[spread]
    rows = np.array([shape[0] if shape else 1 for shape in names.shapes])
    width = np.array([prod(shape[1:]) for shape in names.shapes])
    size = np.where([bool(shape) for shape in names.shapes], -(-rows // shards), 1)
    low = np.minimum(rank % shards * size, rows) * (rows > 1)
    high = np.minimum(low + size, rows)
    spans = np.stack([low * width, high * width - 1], axis=1)
    spans[high <= low] = (0, -1)
    return RankLayout(names, spans)


@lru_cache(maxsize=4)
def _names_of_model(count: int) -> LayoutNames:
    names, dtypes, shapes = zip(*tensors_of_model(count), strict=True)
    return LayoutNames(names, dtypes, shapes, (Ownership.SHARED,) * len(names))


def plan_ranks(layouts: tuple[RankLayout, ...], *, trace: bool = False) -> Planned:
    """Plans for these ranks and compares their replicas, which are equal. `trace`: measures memory too, slowly."""
    ranks = [RankMessages(layout, {"epoch": "0"}) for layout in layouts]
    coordinator = PlanCoordinator()
    heads = [rank.head() for rank in ranks]
    if trace:
        tracemalloc.start()
    began = time.process_time()
    wanted = coordinator.ask(heads)
    seconds = time.process_time() - began
    details = [rank.details(each) for rank, each in zip(ranks, wanted, strict=True)]
    began = time.process_time()
    answers = coordinator.share(details)
    seconds += time.process_time() - began
    shares = tuple(rank.share(answer) for rank, answer in zip(ranks, answers, strict=True))
    sums = [_equal_sums(layout, share) for layout, share in zip(layouts, shares, strict=True)]
    began = time.process_time()
    verdicts = coordinator.judge(sums)
    seconds += time.process_time() - began
    for verdict in verdicts:
        RankMessages.check(verdict)
    peak = tracemalloc.get_traced_memory()[1] if trace else 0
    if trace:
        tracemalloc.stop()
    sent = sum(map(len, (*heads, *details, *sums)))
    return Planned(shares, layouts, seconds, peak, sent, sum(map(len, (*wanted, *answers, *verdicts))))


def _equal_sums(layout: RankLayout, share: PlanShare) -> bytes:
    """Checksums that depend on what is summed, not on whose it is."""
    names = layout.tensors.names
    firsts = layout.spans[:, 0].tolist()
    return RankMessages.sums([zlib.crc32(names[place].encode()) + firsts[place] for place in share.compares])
