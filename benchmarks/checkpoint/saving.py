"""Rows `stall-*`, `stall-dcp-*` and `write-*`: one save gives a sample of each."""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from benchmarks.checkpoint import floors, state
from benchmarks.checkpoint.dcp import Dcp
from benchmarks.checkpoint.rows import REPEATS, Interval
from everstep.checkpoint.session import Checkpointer

STALL = 1.15  # times a plain copy
STALL_MORE = 0.005  # seconds beside
WRITE = 1.15

DCP_MODES = ("thread", "process")


def rows(size: int, name: str, folder: Path, wanted: Collection[str]) -> Iterator[Interval]:
    """Saves of a state of `size` bytes, one after the other, each waited for; the arms alternate."""
    with_dcp = "stall-dcp" in wanted
    stall = Interval(f"stall-{name}", "s", STALL)
    against = Interval(f"stall-dcp-{name}", "s", 1.0, strict=True)
    write = Interval(f"write-{name}", "s", WRITE)
    objects = state.made(size)
    sources = state.tensors(objects)
    dcp = {mode: Dcp(objects, folder / f"dcp-{mode}", mode) for mode in DCP_MODES if with_dcp}
    with Checkpointer(folder / "ours", every="365d", keep_last=1) as ckpt:
        ckpt.track(**objects)
        stall.samples["first"] = [_save(ckpt, 1, folder)[0]]
        length = int(ckpt.metrics()["bytes"] or 0)
        with floors.buffer(length) as buffer:
            for number in range(REPEATS + 1):  # the first round only warms
                took, stored = _save(ckpt, 2 + number, folder)
                samples = {
                    "ours": took,
                    "floor": floors.copy(buffer, sources),
                    **{f"dcp {mode}": each.stall() for mode, each in dcp.items()},
                }
                if "write" in wanted:
                    samples["plain"] = floors.write(folder / "plain", buffer, length)
                if number:
                    write.samples.setdefault("ours", []).append(stored)
                    write.samples.setdefault("floor", []).append(samples.pop("plain", 0.0))
                    for arm, sample in samples.items():
                        stall.samples.setdefault(arm, []).append(sample)
    for each in dcp.values():
        each.close()
    stall.target = STALL + STALL_MORE / statistics.median(stall.samples["floor"])
    if "stall" in wanted:
        yield stall
    if with_dcp:
        modes = [stall.samples[f"dcp {mode}"] for mode in DCP_MODES]
        against.samples = {"ours": stall.samples["ours"], "floor": min(modes, key=statistics.median)}
        yield against
    if "write" in wanted:
        yield write
    del objects, sources
    gc.collect()
    shutil.rmtree(folder / "ours")


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
