"""Models that are trained on a device, saved from it and compared bit for bit."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import everstep
from tests.checkpoint.grouping import group_session

KIND = os.environ.get("EVERSTEP_TEST_DEVICE", "cuda")


def devices() -> list[torch.device]:
    """Every device of the kind that is tested."""
    count = torch.cuda.device_count() if KIND == "cuda" else 1
    return [torch.device(KIND, index) for index in range(count)]


class Training:
    """A model with statistics and an optimizer with moments, on one device."""

    def __init__(self, device: torch.device, width: int = 256, kind: Any = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(7)
        self.device = device
        layers = [torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width)]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = kind(self.model.parameters(), lr=1e-3, **options)
        self.data = torch.randn(32, width, device=device)

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.data).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors, in main memory."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, own in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": value for name, value in own.items() if torch.is_tensor(value)}
        return {name: value.detach().to("cpu", copy=True) for name, value in found.items()}


@contextmanager
def slots_folder() -> Iterator[Path]:
    """Shared memory for the slots of one test: CUDA registers no pages of files on disks."""
    folder = Path("/dev/shm") / f"everstep-gpu-test-{uuid.uuid4().hex}"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def session(store: Path, memory: Path, **options: Any) -> Iterator[Any]:
    """A session in which nothing is saved but by hand."""
    common: dict[str, Any] = {"every_steps": 10**9, "keep_last": 100, "linger": 5.0, "commit_timeout": 120.0}
    with everstep.checkpointer(store, **group_session(directory=memory, **common | options)) as ckpt:
        yield ckpt


def restored(store: Path, training: Training, step: int | None = None) -> dict[str, torch.Tensor]:
    """The state of a fresh training after a restore into it."""
    with slots_folder() as memory, session(store, memory) as ckpt:
        start = ckpt.restore(**training.objects(), step=step) if step else ckpt.restore(**training.objects())
        assert step is None or start.step == step
    assert all(param.device.type == training.device.type for param in training.model.parameters())
    return training.state()


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bit for bit, by name."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value.view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8)), name
