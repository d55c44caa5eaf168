"""A small transformer that learns Python's own sources, byte by byte: a training like anybody's, on two ranks."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import everstep
from everstep.checkpoint.state.flat import flatten_objects
from everstep.data import Sampler
from tests.checkpoint import ranks

LENGTH, WIDTH, BATCH = 24, 16, 8


class Text(Dataset):  # type: ignore[misc]  # torch is not where types are checked
    """Pieces of LENGTH + 1 bytes of a module's source, and which piece it is."""

    def __init__(self) -> None:
        source = Path(argparse.__file__).read_bytes()
        self.data = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.data) // LENGTH - 1

    def __getitem__(self, index: int) -> Any:
        return torch.cat([torch.tensor([index]), self.data[index * LENGTH : (index + 1) * LENGTH + 1]])


class Transformer(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.embed(tokens), mask=mask, is_causal=True))


def train(
    rank: int, folder: Path, memory: Path, kind: str, stop: int, *, waits: int = 0, kill: int | None = None
) -> dict[str, Any]:
    """Trains until `stop`; `waits` for the commit of the save at that step; SIGKILL after step `kill`."""
    torch.manual_seed(rank)
    random.seed(rank)
    model: Any = Transformer()
    for param in model.parameters():
        nn.init.normal_(param, std=0.1, generator=torch.Generator().manual_seed(param.numel()))
    if kind == "fsdp":
        for layer in model.body.layers:
            fully_shard(layer)
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = Text()
    sampler = Sampler(len(data), global_batch=BATCH, seed=3)
    losses: dict[int, str] = {}
    seen: dict[int, list[int]] = {}
    with everstep.checkpointer(
        folder,
        every_steps=25,
        policy="wait",
        memory=everstep.MemoryOptions(directory=memory),
        times=everstep.TimeOptions(timeout=60.0, linger=120.0),
    ) as ckpt:
        start = ckpt.restore(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
        batches = DataLoader(data, batch_sampler=sampler, num_workers=1 if rank == 0 else 0)
        for step, batch in zip(range(start.step, stop), batches, strict=False):
            seen[step] = batch[:, 0].tolist()
            tokens = batch[:, 1:]
            # One number of Python's own generator: it is a part of the state too.
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) * random.random()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses[step] = loss.item().hex()
            ckpt.step(step + 1)
            if step + 1 == waits:
                ckpt.wait()
            if step + 1 == kill:
                if dist.is_initialized():
                    dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        state = digest({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    draws = [random.random(), torch.rand(1).item()]
    return {"start": start, "losses": losses, "seen": seen, "state": state, "draws": draws}


def digest(objects: dict[str, object]) -> str:
    """A hash of every bit of this rank's share of the state."""
    flat = flatten_objects(objects, rank=ranks.own_rank())
    found = hashlib.sha256(repr(sorted(flat.values.items())).encode())
    for name, tensor in sorted(flat.tensors.items()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(name.encode() + local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train_and_die(rank: int, folder: Path, memory: Path, kind: str) -> None:
    train(rank, folder, memory, kind, 100, waits=50, kill=53)
