"""A few steps of a pipeline on GPUs, as each process of a test does them: imported by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from everstep.pipeline import EngineOptions, LayoutOptions, PlanOptions, pipeline
from tests.gpu.trainings import KIND

STEPS = 3
LAYERS = 6 if KIND == "cuda" else 2  # on a processor the tests themselves are tried, most of which is tracing
SAMPLES, WORDS, WIDTH = 16, 12, 32


@dataclass(frozen=True)
class PipelinedRun:
    """The options of a training that any number of processes bring to the same weights."""

    schedule: str = "1f1b"
    stages: int = 2
    replicas: int = 1
    microbatches: int = 4
    costs: Literal["measured", "counted"] = "counted"
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64
    compiles: bool = False
    engine: dict[str, Any] = field(default_factory=dict)


class Language(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Attention, dropout, and a weight that the first and the last stage share."""

    def __init__(self, run: PipelinedRun) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(50, WIDTH, dtype=run.dtype)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, run.dropout, batch_first=True, norm_first=True, dtype=run.dtype)
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH, dtype=run.dtype)
        self.head = nn.Linear(WIDTH, 50, bias=False, dtype=run.dtype)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def sum_losses(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def draw_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of a step, of all replicas, in main memory."""
    drawn = torch.randint(0, 50, (SAMPLES, WORDS + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def train_pipeline(run: PipelinedRun, device: torch.device) -> dict[str, Any]:
    """Train this process's part, and tell of it."""
    model = Language(run).to(device)
    if run.compiles:
        for layer in model.layers:
            layer.compile()
    words, targets = draw_batch(0)
    losses = []
    with pipeline(
        model,
        words.to(device),
        sum_losses,
        targets=targets.to(device),
        stages=run.stages,
        microbatches=run.microbatches,
        schedule=run.schedule,
        layout=LayoutOptions(data_parallel=run.replicas, global_batch=SAMPLES),
        plan=PlanOptions(costs=run.costs),
        engine=EngineOptions(seed=5, timeout=120.0, **run.engine),
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.groups(), lr=1e-2, eps=1e-6 if run.dtype == torch.float64 else 1e-3)
        share = SAMPLES // pipe.replicas
        mine = slice(pipe.replica * share, (pipe.replica + 1) * share)
        for step in range(STEPS):
            words, targets = draw_batch(step)
            losses.append(pipe.step(words[mine].to(device), targets[mine].to(device)).loss)
            optimizer.step()
        weights = {name: each.detach().cpu() for name, each in pipe.named_parameters()}
        places = {each.device.type for each in pipe.parameters()}
    return {"losses": losses, "weights": weights, "places": places}


def run_ranks(rank: int, runs: Sequence[PipelinedRun], backend: str, folder: str, devices: Sequence[int]) -> None:
    """The work of one process: all runs, one after the other; what it has to tell of them lies in a file."""
    device = torch.device(KIND, devices[rank])
    if KIND == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # threads of several processes would take turns on the same cores
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(devices))
    torch.save([train_pipeline(run, device) for run in runs], f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
