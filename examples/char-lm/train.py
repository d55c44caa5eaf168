"""A character language model learns to write Python from the sources of Python's own standard library.

A small transformer with DistributedDataParallel; prints how many bits per character it needs for files that it has not
seen (an untrained model: 7), and a sample of its writing. It saves every 50 steps, and goes on from there after a
restart: in a job of several nodes if `spec.checkpoint` names a place that they share.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from model import VOCABULARY, CharTransformer
from sources import batch, corpus
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import everstep


def options() -> argparse.Namespace:
    given = json.loads(os.environ.get("SM_HPS", "{}"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=given.get("steps", "300"))
    parser.add_argument("--batch-size", type=int, default=given.get("batch-size", "24"), help="sequences of one rank")
    parser.add_argument("--context", type=int, default=given.get("context", "64"), help="characters of one sequence")
    parser.add_argument("--lr", type=float, default=given.get("lr", "0.003"))
    parser.add_argument("--seed", type=int, default=given.get("seed", "0"))
    parser.add_argument("--save-every", type=int, default=given.get("save-every", "50"), help="steps")
    return parser.parse_args()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, device: torch.device) -> Tensor:
    logits = model(inputs.to(device))
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.to(device).reshape(-1))


@torch.no_grad()
def bits_per_character(model: nn.Module, text: Tensor, context: int, device: torch.device) -> float:
    losses = [loss_of(model, *batch(text, 32, context, (-1, i)), device).item() for i in range(16)]
    return sum(losses) / len(losses) / math.log(2)


def main() -> None:
    given = options()
    torch.set_num_threads(1)  # the ranks are the parallelism
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(given.seed)
    model = CharTransformer(context=given.context).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=given.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=given.lr, total_steps=given.steps)
    learn, held_out = corpus()
    print(f"rank {rank} of {dist.get_world_size()}: {len(learn):,} characters to learn from", flush=True)

    with contextlib.ExitStack() as stack:
        start, checkpoints = 0, None
        if everstep.has_checkpoint_store():
            checkpoints = stack.enter_context(everstep.checkpointer(every_steps=given.save_every))
            start = checkpoints.restore(model=model, optimizer=optimizer, schedule=schedule).step
        for step in range(start + 1, given.steps + 1):
            optimizer.zero_grad()
            loss = loss_of(parallel, *batch(learn, given.batch_size, given.context, (given.seed, step, rank)), device)
            loss.backward()
            nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            everstep.progress(step, total=given.steps, loss=loss.item())
            if checkpoints is not None:
                checkpoints.step(step)
            if rank == 0 and step % 50 == 0:
                print(f"step {step}/{given.steps} loss {loss.item():.3f}", flush=True)

    if rank == 0:
        everstep.progress(given.steps, total=given.steps, phase="eval")
        print(f"bits per character {bits_per_character(model, held_out, given.context, device):.2f}")
        print("--- sample\n" + model.write("def ", 200, given.seed), flush=True)
        folder = Path(os.environ.get("SM_MODEL_DIR", "/opt/ml/model"))
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), folder / "model.pt")
    dist.barrier()  # gloo aborts a rank that leaves while another still ends its last step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
