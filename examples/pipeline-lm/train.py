"""The character model of char-lm, cut into stages: four of them on two replicas of the data, or however many there are.

The model is the one of char-lm, unchanged. What differs from its training is `pipeline(…)`, and that a step is
`run.step(…)`. Checkpoints hold the model under its own names: a run goes on with another number of stages, and char-lm
loads what was trained here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import everstep
from everstep.pipeline import EngineOptions, LayoutOptions, PlanOptions, pipeline

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "char-lm"))
from model import VOCABULARY, CharTransformer
from sources import batch, corpus


def options() -> argparse.Namespace:
    given = json.loads(os.environ.get("SM_HPS", "{}"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, help="default: as the job says, or one for each rank")
    parser.add_argument("--microbatches", type=int, help="default: as the job says, or the best")
    parser.add_argument("--schedule", help="default: as the job says, or the best")
    parser.add_argument("--steps", type=int, default=given.get("steps", "300"))
    parser.add_argument("--global-batch", type=int, default=given.get("global-batch", "48"), help="sequences of a step")
    parser.add_argument("--context", type=int, default=given.get("context", "64"), help="characters of one sequence")
    parser.add_argument("--depth", type=int, default=given.get("depth", "4"), help="layers")
    parser.add_argument("--width", type=int, default=given.get("width", "128"))
    parser.add_argument("--lr", type=float, default=given.get("lr", "0.003"))
    parser.add_argument("--seed", type=int, default=given.get("seed", "0"))
    parser.add_argument("--checkpoints", default=given.get("checkpoints"), help="a folder or a URL; default: the job's")
    parser.add_argument("--plan", help="a file where the plan is kept; default: as the job says, or none")
    parser.add_argument("--save-every", type=int, default=given.get("save-every", "50"), help="steps")
    return parser.parse_args()


def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The sum over all characters, and how many they are: exact however a batch is cut."""
    total = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="sum")
    return total, targets.numel()


def main() -> None:
    given = options()
    torch.set_num_threads(1)  # the ranks are the parallelism
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")

    learn, held_out = corpus()
    torch.manual_seed(given.seed)
    model = CharTransformer(given.context, width=given.width, depth=given.depth)
    example, targets = batch(learn, given.global_batch, given.context, (0,))
    with (
        pipeline(
            model,
            example.to(device),
            loss,
            targets=targets.to(device),
            stages=given.stages,
            microbatches=given.microbatches,
            schedule=given.schedule,
            layout=LayoutOptions(global_batch=given.global_batch),
            plan=PlanOptions(file=given.plan),
            engine=EngineOptions(seed=given.seed, clip=1.0),
        ) as run,
        contextlib.ExitStack() as stack,
    ):
        optimizer = torch.optim.AdamW(run.groups(), lr=given.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=given.lr, total_steps=given.steps)
        start, checkpoints = 0, None
        if given.checkpoints or everstep.has_checkpoint_store():
            checkpoints = stack.enter_context(everstep.checkpointer(given.checkpoints, every_steps=given.save_every))
            start = checkpoints.restore(model=run, optimizer=optimizer, scheduler=schedule).step
        print(f"rank {dist.get_rank()}: {run.extra_repr()}; begins at step {start}", flush=True)

        share = given.global_batch // run.replicas
        mine = slice(run.replica * share, (run.replica + 1) * share)
        for step in range(start + 1, given.steps + 1):
            text, following = batch(learn, given.global_batch, given.context, (given.seed, step))
            output = run.step(text[mine], following[mine])
            optimizer.step()
            schedule.step()
            if checkpoints is not None:
                checkpoints.step(step)
            everstep.progress(step, total=given.steps, loss=output.loss)
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step}/{given.steps} loss {output.loss:.4f}", flush=True)

        run.eval()
        losses = [run.evaluate(*batch(held_out, share, given.context, (-1, i, run.replica))).loss for i in range(4)]
        if dist.get_rank() == 0:
            print(f"bits per character {sum(losses) / len(losses) / math.log(2):.2f}", flush=True)
    dist.barrier()  # gloo aborts a rank that leaves while another still ends its last step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
