"""Row `start`: from the start of a process to the end of its first step, with a restore in between and without.

`python -m benchmarks.checkpoint.starting STORE SIZE` is the process; an empty STORE means that it restores nothing.
Both import torch, build the model with its optimizer and train one step.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.interval import REPEATS, Interval
from benchmarks.measure import alternate

SIZE = 100_000_000  # bytes of the state
TARGET = 1.1  # times the same process without a checkpoint
ALLOWANCE = 0.2  # seconds: everstep's own modules, the session, and the restore itself


def row(folder: Path) -> Interval:
    """Measure a start with the checkpoint in the page cache, as after a restart on the same machine."""
    store = folder / "start"
    _save(store)
    result = Interval("start-100m", "s", TARGET, allowance=ALLOWANCE)
    alternate(result, lambda: _run(str(store)), lambda: _run(""), REPEATS)
    shutil.rmtree(store)
    return result


def _run(store: str) -> float:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoint.starting", store, str(SIZE)],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    # CLOCK_MONOTONIC is the same in all processes; what the interpreter does at its end is not counted.
    return float(done.stdout.split()[-1]) - began


def _save(store: Path) -> None:
    from benchmarks.checkpoint import state
    from everstep.checkpoint.session.checkpointer import Checkpointer
    from everstep.checkpoint.session.options import MemoryOptions

    with Checkpointer(store, every="365d", memory=MemoryOptions(slots=1)) as ckpt:
        ckpt.track(**state.made(SIZE))
        ckpt.save(1)


def main() -> None:
    store, size = sys.argv[1], int(sys.argv[2])
    import torch

    from benchmarks.checkpoint import state

    objects = state.started(state.model_of(size))
    model, optimizer = objects["model"], objects["optimizer"]
    assert isinstance(model, torch.nn.ModuleList)
    assert isinstance(optimizer, torch.optim.Optimizer)
    if store:
        import everstep

        ckpt = everstep.checkpointer(store, every="365d", memory=everstep.MemoryOptions(slots=1))
        assert ckpt.restore(model=model, optimizer=optimizer).step == 1
    torch.stack([layer(torch.ones(1, layer.in_features)).sum() for layer in model]).sum().backward()
    optimizer.step()
    print(time.monotonic(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
