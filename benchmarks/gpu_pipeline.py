"""A pipeline of one stage on one GPU, beside the loop over micro-batches of a script: the cost of the engine itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from everstep.pipeline import EngineOptions, pipeline

REPEATS = 5
STEPS = 5
MICROBATCHES = 8
VOCABULARY = 1000
# Width, layers, words of a sample, samples: one whose kernels keep a GPU busy, and one that waits for their launches.
LARGE, SMALL, TINY = (2048, 8, 1024, 32), (512, 8, 128, 32), (64, 2, 16, 8)

Samples = dict[str, list[float]]


class Language(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """A transformer with dropout, in bfloat16 under autocast."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.1, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


def sum_losses(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def pipeline_rows(device: torch.device, folder: Path) -> dict[str, Samples]:
    """Measure steps of both in turn, and the most memory that a step of each takes."""
    if device.type == "cpu":
        return {"pipeline-step": compare_steps(device, folder, TINY)[0]}
    seconds, memory = compare_steps(device, folder, LARGE)
    launches, _ = compare_steps(device, folder, SMALL)
    return {"pipeline-step": seconds, "pipeline-memory": memory, "pipeline-step-launches": launches}


def compare_steps(device: torch.device, folder: Path, sizes: tuple[int, int, int, int]) -> tuple[Samples, Samples]:
    """Return the seconds of steps, and the gigabytes, of a model of these sizes."""
    width, depth, length, samples = sizes
    torch.manual_seed(0)
    words = torch.randint(0, VOCABULARY, (samples, length), device=device)
    targets = torch.randint(0, VOCABULARY, (samples, length), device=device)
    by_hand = Language(width, depth).to(device)
    plain = torch.optim.AdamW(by_hand.parameters(), lr=1e-4)
    meeting = folder / f"rendezvous-{width}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    try:
        with pipeline(
            Language(width, depth).to(device),
            words,
            sum_losses,
            targets=targets,
            stages=1,
            microbatches=MICROBATCHES,
            engine=EngineOptions(precision="bf16"),
        ) as run:
            optimizer = torch.optim.AdamW(run.groups(), lr=1e-4)

            def step_by_hand() -> None:
                plain.zero_grad()
                with torch.autocast(device.type, torch.bfloat16):
                    for part, wanted in zip(words.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
                        total, _ = sum_losses(by_hand(part), wanted)
                        (total / targets.numel()).backward()
                plain.step()

            def step() -> None:
                run.step(words, targets)
                optimizer.step()

            seconds: Samples = {"ours": [], "floor": []}
            memory: Samples = {"ours": [], "floor": []}
            for number in range(REPEATS + 1):
                for kind, work in (("ours", step), ("floor", step_by_hand)):
                    took, most = measure_steps(work, device)
                    if number:
                        seconds[kind].append(took)
                        memory[kind].append(most / 1e9)
    finally:
        dist.destroy_process_group()
    return seconds, memory


def measure_steps(work: Callable[[], None], device: torch.device) -> tuple[float, int]:
    """Return the seconds of some steps, and the bytes that they have at most beyond what is there before."""
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = time.perf_counter() - began
    return took, torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
