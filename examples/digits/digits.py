"""Shared parts of both training scripts: the hyperparameters, scikit-learn's digits, the model and the training loop.

Nothing here knows how gradients are averaged: `train.py` and `train_horovod.py` bring that along.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep

SAVE_EVERY = 100  # steps


# The ranks are the parallelism here; more threads would only take the cores from each other.
torch.set_num_threads(1)


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int
    size: int
    device: torch.device


def options() -> argparse.Namespace:
    """Hyperparameters from the command line, else those of the job (`SM_HPS`), else these defaults."""
    given = json.loads(os.environ.get("SM_HPS", "{}"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=given.get("epochs", "30"))
    parser.add_argument("--lr", type=float, default=given.get("lr", "0.05"))
    parser.add_argument("--batch-size", type=int, default=given.get("batch-size", "16"), help="samples of one rank")
    parser.add_argument("--seed", type=int, default=given.get("seed", "0"))
    parser.add_argument("--dump-gradients", type=Path, default=os.environ.get("EVERSTEP_DIGITS_DUMP_GRADS"))
    parser.add_argument("--dump-steps", type=int, default=5, help="dump the averaged gradients of so many steps")
    return parser.parse_args()


def device(local_rank: int) -> torch.device:
    """The GPU of this rank, or the CPU where there is none."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def build_model(seed: int) -> nn.Module:
    """Two layers, with the same weights on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to learn from and 360 held out; pixels are scaled to 0…1."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32) / 16
    classes = torch.tensor(labels, dtype=torch.long)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    learn, held_out = order[:1437], order[1437:]
    return TensorDataset(pixels[learn], classes[learn]), TensorDataset(pixels[held_out], classes[held_out])


def train(
    model: nn.Module,
    options: argparse.Namespace,
    world: World,
    zero_gradients: Callable[[], None],
    average_and_step: Callable[[], None],
    saved: dict[str, object],
) -> None:
    """Train `model`. `average_and_step` leaves the averaged gradients in the parameters until the next step. What is
    `saved` is restored first, and saved every 100 steps, if this job has a place for checkpoints.
    """
    data, _ = load()
    # Which samples a rank sees follows from the seed, the epoch and its rank alone, never from timing.
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        data, num_replicas=world.size, rank=world.rank, seed=options.seed, drop_last=True
    )
    batches = DataLoader(data, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    print(f"rank {world.rank} of {world.size} on {socket.gethostname()}: {len(sampler)} images", flush=True)

    total = options.epochs * len(batches)
    gradients: list[dict[str, Tensor]] = []
    with contextlib.ExitStack() as stack:
        checkpoints, start = None, 0
        if saved and everstep.has_checkpoint_store():
            checkpoints = stack.enter_context(everstep.checkpointer(every_steps=SAVE_EVERY))
            start = checkpoints.restore(**saved).step
        for step, (pixels, classes) in enumerate(_each_batch(batches, sampler, options.epochs), 1):
            if step <= start:
                continue
            zero_gradients()
            loss = nn.functional.cross_entropy(model(pixels.to(world.device)), classes.to(world.device))
            loss.backward()
            average_and_step()
            everstep.progress(step, total=total, loss=loss.item())
            if checkpoints is not None:
                checkpoints.step(step)
            if options.dump_gradients and step <= options.dump_steps:
                weights = model.named_parameters()
                gradients.append({name.removeprefix("module."): w.grad.cpu().clone() for name, w in weights})
            if world.rank == 0 and step % len(batches) == 0:
                print(f"epoch {step // len(batches)}/{options.epochs} loss {loss.item():.4f}", flush=True)
    if options.dump_gradients and world.rank == 0:
        torch.save(gradients, options.dump_gradients)


def _each_batch(
    batches: DataLoader[tuple[Tensor, ...]], sampler: DistributedSampler[tuple[Tensor, ...]], epochs: int
) -> Iterator[tuple[Tensor, ...]]:
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield from batches


@torch.no_grad()
def finish(model: nn.Module, world: World) -> None:
    """On rank 0: test the model on the held-out images and save it."""
    if world.rank != 0:
        return
    pixels, classes = load()[1].tensors
    right = model(pixels.to(world.device)).argmax(dim=1).cpu() == classes
    print(f"accuracy {right.float().mean().item():.2f}", flush=True)

    folder = Path(os.environ.get("SM_MODEL_DIR", "/opt/ml/model"))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "model.pt")
