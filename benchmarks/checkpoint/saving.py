"""Rows `stall-*`, `stall-dcp-*` and `write-*`: one save gives a sample of each."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Set
from pathlib import Path

from benchmarks.checkpoint import floors, state
from benchmarks.checkpoint.dcp import Dcp
from benchmarks.interval import REPEATS, Interval
from everstep.checkpoint.session.checkpointer import Checkpointer

STALL = 1.15  # times a plain copy
STALL_MORE = 0.005  # seconds beside
WRITE = 1.15

DCP_MODES = ("thread", "process")


def rows(size: int, name: str, folder: Path, wanted: Set[str]) -> Iterator[Interval]:
    """Saves of a state of `size` bytes, one after the other, each waited for; the arms alternate."""
    stall = Interval(f"stall-{name}", "s", STALL)
    write = Interval(f"write-{name}", "s", WRITE)
    objects = state.made(size)
    sources = state.tensors(objects)
    steps = itertools.count(1)
    with Checkpointer(folder / "ours", every="365d", keep_last=1) as ckpt:
        ckpt.track(**objects)
        stall.samples["first"] = [_save(ckpt, next(steps), folder)[0]]
        length = int(ckpt.metrics()["bytes"] or 0)
        with floors.buffer(length) as buffer:
            for number in range(REPEATS + 1 if wanted & {"stall", "write"} else 0):  # the first round only warms
                took, stored = _save(ckpt, next(steps), folder)
                floor = floors.copy(buffer, sources)
                plain = floors.write(folder / "plain", buffer, length) if "write" in wanted else 0.0
                if number:
                    _add(stall, took, floor)
                    _add(write, stored, plain)
        if "stall" in wanted:
            stall.target = STALL + STALL_MORE / statistics.median(stall.samples["floor"])
            yield stall
        if "write" in wanted:
            yield write
        if "stall-dcp" in wanted:
            yield _against_dcp(objects, ckpt, steps, folder, name)
    del objects, sources
    gc.collect()
    shutil.rmtree(folder / "ours")


def _against_dcp(
    objects: dict[str, object], ckpt: Checkpointer, steps: Iterator[int], folder: Path, name: str
) -> Interval:
    """In rounds of its own: the threads and processes of torch's savers would disturb a copy of 10 ms."""
    row = Interval(f"stall-dcp-{name}", "s", 1.0, strict=True)
    modes = {mode: Dcp(objects, folder / f"dcp-{mode}", mode) for mode in DCP_MODES}
    stalls: dict[str, list[float]] = {mode: [] for mode in modes}
    for number in range(REPEATS + 1):
        os.sync()  # they write without fsync, and that is not to be flushed beside the next arm
        took, _ = _save(ckpt, next(steps), folder)
        theirs = {mode: each.stall() for mode, each in modes.items()}
        if number:
            row.samples.setdefault("ours", []).append(took)
            for mode, each in theirs.items():
                stalls[mode].append(each)
    for each_mode in modes.values():
        each_mode.close()
    row.samples["floor"] = min(stalls.values(), key=statistics.median)
    row.samples |= {f"dcp {mode}": samples for mode, samples in stalls.items()}
    return row


def _add(row: Interval, ours: float, floor: float) -> None:
    row.samples.setdefault("ours", []).append(ours)
    row.samples.setdefault("floor", []).append(floor)


def _save(ckpt: Checkpointer, step: int, folder: Path) -> tuple[float, float]:
    """(the stall, from filled to committed), in seconds."""
    began = time.perf_counter()
    assert ckpt.save(step).saves
    took = time.perf_counter() - began
    ckpt.wait()
    stored = ckpt.metrics()["save_seconds"]
    assert stored is not None
    # Retention reads the new checkpoint back and removes the old one: not beside the next arm.
    until = time.monotonic() + 120
    while len(list((folder / "ours" / "data").glob("*/*"))) > 1:
        assert time.monotonic() < until
        time.sleep(0.01)
    return took, stored
