"""`make bench-gpu`: what a save holds training up for, and a restore takes, against plain copies of the same bytes.

Needs nothing but torch and everstep, so that it runs with any Python that has torch. `--device cpu` tries the rows.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import everstep
from benchmarks.gpu_pipeline import pipeline_rows

RESULT = Path("build/bench/gpu.json")
REPEATS = 5
LAYERS = 16
FEW, MANY = 64, 4096  # samples of a step
TRAINED_STEPS = {FEW: 40, MANY: 8}

Samples = dict[str, list[float]]


class Model:
    """Weights and two moments of an Adam, of a number of bytes together.

    Forward and backward of FEW samples take less time than a copy of the state, which the optimizer then waits for;
    those of MANY hide it, as in most trainings.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        width = max(16, int((size / 3 / 4 / LAYERS) ** 0.5))
        self.device = device
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-6)
        self.data = torch.randn(FEW, width, device=device)

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        own = [each for state in self.optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
        return [*(param.detach() for param in self.model.parameters()), *own]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def timed(model: Model, work: Callable[[], Any]) -> float:
    """Seconds, between two moments at which the device has nothing to do."""
    model.wait()
    began = time.perf_counter()
    work()
    model.wait()
    return time.perf_counter() - began


def stall_rows(model: Model, ckpt: Any, folder: Path) -> dict[str, Samples]:
    """Measure a save until it returns, beside a plain copy into page-locked memory and torch.save."""
    targets = [torch.empty(each.shape, dtype=each.dtype, pin_memory=model.device.type == "cuda") for each in
               model.tensors()]  # fmt: skip

    def copy() -> None:
        for target, source in zip(targets, model.tensors(), strict=True):
            target.copy_(source, non_blocking=True)

    def save_whole() -> None:
        torch.save({name: each.state_dict() for name, each in model.objects().items()}, folder / "whole.pt")

    copied: Samples = {"ours": [], "floor": []}
    written: Samples = {"ours": [], "floor": []}
    for number in range(REPEATS + 1):  # the first round only warms
        model.step()
        model.wait()
        began = time.perf_counter()
        ckpt.save(number + 1)
        took = time.perf_counter() - began
        ckpt.wait()
        plain, whole = timed(model, copy), timed(model, save_whole)
        if number:
            for samples, floor in ((copied, plain), (written, whole)):
                samples["ours"].append(took)
                samples["floor"].append(floor)
    return {"stall-copy": copied, "stall-torch-save": written}


def train_cost_row(model: Model, ckpt: Any, first: int) -> Samples:
    """Steps with one save among them, beside as many without."""

    steps = TRAINED_STEPS[len(model.data)]

    def train(saves: bool) -> None:
        for number in range(steps):
            model.step()
            if saves and number == steps // 2:
                ckpt.save(first)

    samples: Samples = {"ours": [], "floor": []}
    for number in range(REPEATS + 1):
        first += 1
        ours = timed(model, lambda: train(True))
        ckpt.wait()
        plain = timed(model, lambda: train(False))
        if number:
            samples["ours"].append(ours)
            samples["floor"].append(plain)
    return samples


def restore_row(size: int, device: torch.device, store: Path, memory: Path) -> Samples:
    """Measure a restore into a model on the device, beside a read of as many bytes and their copy to it."""
    parts = sorted(each for each in (store / "data").rglob("*") if each.is_file() and each.stat().st_size > size // 10)
    newest = max(parts, key=lambda each: each.stat().st_mtime)
    length = newest.stat().st_size
    pages = mmap.mmap(-1, length)
    host = torch.frombuffer(pages, dtype=torch.uint8)
    host.fill_(0)
    target = torch.empty(length, dtype=torch.uint8, device=device)
    samples: Samples = {"ours": [], "floor": []}
    for number in range(REPEATS + 1):
        fresh = Model(size, device)
        fresh.step()
        with everstep.checkpointer(
            store, every_steps=10**9, memory=everstep.MemoryOptions(directory=memory / str(number))
        ) as ckpt:
            ours = timed(fresh, partial(ckpt.restore, **fresh.objects()))

        def read() -> None:
            with newest.open("rb", buffering=0) as file, memoryview(pages) as view:
                at = 0
                while count := file.readinto(view[at : at + (8 << 20)]):
                    at += count
            target.copy_(host)

        plain = timed(fresh, read)
        if number:
            samples["ours"].append(ours)
            samples["floor"].append(plain)
        del fresh
    return samples


def measure(size: int, device: torch.device, folder: Path, memory: Path) -> dict[str, Samples]:
    """Measure all rows with one store."""
    model = Model(size, device)
    model.step()
    with everstep.checkpointer(
        folder / "store",
        every_steps=10**9,
        keep_last=2,
        memory=everstep.MemoryOptions(directory=memory / "save"),
        times=everstep.TimeOptions(linger=5.0),
    ) as ckpt:
        ckpt.track(**model.objects())
        rows = stall_rows(model, ckpt, folder)
        rows["train-cost-short-steps"] = train_cost_row(model, ckpt, 1000)
        model.data = model.data.repeat(MANY // FEW, 1)
        rows["train-cost-long-steps"] = train_cost_row(model, ckpt, 2000)
    del model
    rows["restore"] = restore_row(size, device, folder / "store", memory)
    return rows | pipeline_rows(device, folder)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make bench-gpu")
    parser.add_argument("--size", type=int, default=1_000_000_000, help="bytes of the state")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="where checkpoints go")
    chosen = parser.parse_args(arguments)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"make bench-gpu: torch {torch.__version__} in {sys.executable} finds no NVIDIA GPU", file=sys.stderr)
        return 2
    device = torch.device(chosen.device)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="gpu-", dir=chosen.folder.absolute()))
    memory = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir="/dev/shm"))
    try:
        rows = measure(chosen.size, device, folder, memory)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} processors"
    results = []
    print(f"{name}, torch {torch.__version__}, {chosen.size / 1e9:g} GB; medians of {REPEATS}")
    for row, samples in rows.items():
        ours, floor = statistics.median(samples["ours"]), statistics.median(samples["floor"])
        unit = "GB" if "memory" in row else "s"
        result = {"name": row, "value": ours, "floor": floor, "ratio": ours / floor, "unit": unit, "samples": samples}
        results.append({**result, "device": name, "bytes": chosen.size})
        print(f"{row:24} {ours:10.4f} {unit:2}  floor {floor:10.4f} {unit:2}  ratio {ours / floor:8.3f}")
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1))
    print(f"written to {RESULT}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
