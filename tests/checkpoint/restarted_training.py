"""`torchrun tests/checkpoint/restarted_training.py FOLDER KIND STOP [KILLS]`: a training whose ranks die.

Each rank adds a line for each step that it has trained to FOLDER/<restart>-<rank>. KILLS, as `1:6,0:11`, says for each
restart which rank is killed, in the middle of which step; a rank may also be killed from outside.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.data import Sampler
from tests.checkpoint.text_training import digest

SIZE, BATCH, EVERY = 60, 12, 4
WIDTH = 7  # divisible by no number of ranks: shards are uneven, and some ranks have no element of a bias


def build(kind: str) -> tuple[Any, Any]:
    """Return the model and its optimizer."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Dropout(0.25), nn.Linear(WIDTH, 1))
    if kind == "fsdp":
        fully_shard(model[0])
        fully_shard(model)
    else:
        # Else DDP orders its buckets anew after its first step: three ranks sum in another order in that one.
        model = DistributedDataParallel(model, find_unused_parameters=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(folder: Path, kind: str, stop: int, kills: list[tuple[int, int]]) -> None:
    """Train until `stop`, or until this rank is the one to die in this restart."""
    rank, restart = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    model, optimizer = build(kind)
    torch.manual_seed(rank)
    data = torch.rand(SIZE, 5, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(SIZE, global_batch=BATCH, seed=3)
    dying, at = kills[restart] if restart < len(kills) else (-1, -1)
    with (
        (folder / f"{restart}-{rank}").open("a", buffering=1) as log,
        everstep.checkpointer(
            folder / "store",
            every_steps=EVERY,
            policy="wait",
            memory=everstep.MemoryOptions(directory=folder / "memory"),
            times=everstep.TimeOptions(timeout=60.0, linger=60.0),
        ) as ckpt,
    ):
        start = ckpt.restore(model=model, optimizer=optimizer, sampler=sampler)
        began = {"start": start.step, "tier": start.tier, "pid": os.getpid(), "state": state_of(model, optimizer)}
        log.write(json.dumps(began) + "\n")
        for step in range(start.step, stop):
            loss = model(data[sampler.batch(step)]).square().mean()
            optimizer.zero_grad()
            if (rank, step) == (dying, at):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            done = {"step": step, "loss": loss.item().hex(), "state": state_of(model, optimizer)}
            log.write(json.dumps(done) + "\n")
            ckpt.step(step + 1)


def state_of(model: Any, optimizer: Any) -> str:
    """Return a sum of all bits of the weights and of their moments, whatever number of ranks holds them. Collective."""
    found = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    moments = {
        f"{name}.{key}": optimizer.state.get(param, {}).get(key) for name, param in found.items() for key in KEYS
    }
    whole = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in (found | moments).items()
    }
    return digest({"state": {name: each for name, each in whole.items() if each is not None}})


KEYS = ("exp_avg", "exp_avg_sq")


def main() -> None:
    """Train as the arguments say."""
    folder, kind, stop, *kills = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pairs = [tuple(map(int, each.split(":"))) for each in (kills[0].split(",") if kills else [])]
    train(Path(folder), kind, int(stop), [(rank, step) for rank, step in pairs])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
