"""Row `train-cost`: what a save every 30 s takes from training, the stall and the writer's work beside it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch

from benchmarks.interval import REPEATS, Interval
from everstep.checkpoint.session.checkpointer import Checkpointer

EVERY = 30.0  # seconds
SIZE = 504_000_000  # bytes of the state
MOST = 0.01


def row(folder: Path) -> Interval:
    """Stretches of the same steps, with one save and without, in turn; their difference over 30 s.

    A stretch is longer than a save is on its way, so that all of the writer's work falls into it. One thread computes,
    as a rank does whose other processors belong to other ranks and to the writer.
    """
    result = Interval("train-cost", "of 30 s", MOST, absolute=True, strict=True)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    width = 2048
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(SIZE // 12 // width**2)])
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Checkpointer(folder / "train", every="365d", keep_last=100) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        at = 0

        def stretch(steps: int, saved: bool) -> float:
            nonlocal at
            began = time.perf_counter()
            for number in range(steps):
                step()
                at += 1
                if saved and number == 0:
                    ckpt.save(at)
            return time.perf_counter() - began

        ckpt.save(at)
        ckpt.wait()
        one = stretch(5, saved=False) / 5
        steps = int(2 * (ckpt.metrics()["save_seconds"] or 0.0) / one) + 5
        for number in range(REPEATS + 1):
            without = stretch(steps, saved=False)
            saving = stretch(steps, saved=True)
            ckpt.wait()
            if number:
                result.samples.setdefault("without", []).append(without)
                result.samples.setdefault("with", []).append(saving)
                result.samples.setdefault("ours", []).append((saving - without) / EVERY)
                result.samples.setdefault("stall", []).append(ckpt.metrics()["stall_seconds"] or 0.0)
    shutil.rmtree(folder / "train")
    return result
