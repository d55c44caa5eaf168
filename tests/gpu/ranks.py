"""The work of each rank of a test: in a module of its own, since ranks import it by its name."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.trainings import KIND, Training, session


def train(rank: int, world: int, backend: str, folder: str, memory: str, device: int) -> None:
    """A rank saves while it trains; what all of it was at step 3 it leaves in a file."""
    place = torch.device(KIND, device if backend == "gloo" else rank)
    if KIND == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    training = Training(place)
    ids = [place.index] if KIND == "cuda" else None
    model = DistributedDataParallel(training.model, device_ids=ids)
    with session(Path(folder) / "store", Path(memory), timeout=60.0) as ckpt:
        ckpt.track(model=model, optimizer=training.optimizer)
        for step in range(1, 5):
            training.optimizer.zero_grad()
            model(training.data).square().mean().backward()
            training.optimizer.step()
            if step == 3 and rank == 0:
                torch.save(training.state(), Path(folder) / "meant.pt")
            ckpt.save(step)
    dist.destroy_process_group()
