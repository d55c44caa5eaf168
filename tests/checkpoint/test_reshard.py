"""A checkpoint fits any number of ranks and any way of spreading the model, bit for bit, optimizer included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from everstep.checkpoint.state.flat import flatten_objects  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

KEY = ranks.key(10)


def build(kind: str) -> dict[str, Any]:
    """A model and its optimizer, both without anything learned. 7 and 10 are divisible by no number of ranks."""
    model: Any = nn.Sequential(nn.Linear(7, 10), nn.BatchNorm1d(10), nn.Linear(10, 3, bias=False))
    if kind == "pipeline":
        rank, world = dist.get_rank(), dist.get_world_size()
        kept = {name: layer for i, (name, layer) in enumerate(model.named_children()) if i % world == rank}
        model = nn.ModuleDict(kept)
    elif kind == "fsdp":
        fully_shard(model[0])
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if list(model.parameters()) else None
    return {"model": model, **({"optimizer": optimizer} if optimizer else {})}


def learn(objects: dict[str, Any]) -> None:
    """One step whose result is the same however the model is spread."""
    for name, param in objects["model"].named_parameters():
        whole = torch.Generator().manual_seed(sum(map(ord, name.replace("module.", ""))))
        full = torch.rand(param.shape, generator=whole)
        set_to(param.data, full)
        param.grad = torch.zeros_like(param)
        set_to(param.grad, full - 0.5)
    objects["optimizer"].step()


def set_to(tensor: Any, full: Any) -> None:
    if isinstance(tensor, DTensor):
        from torch.distributed.tensor import distribute_tensor

        tensor.copy_(distribute_tensor(full, tensor.device_mesh, tensor.placements))
    else:
        tensor.copy_(full)


def whole(objects: dict[str, object]) -> dict[str, Any]:
    """All tensors unsharded, by name."""
    flat = flatten_objects(objects, rank=ranks.own_rank())
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in flat.tensors.items()
    }


def write(rank: int, folder: Path, kind: str) -> None:
    objects = build(kind)
    learn(objects)
    ranks.save(PosixStore(folder), KEY, objects)


def read(rank: int, folder: Path, memory: Path, kind: str) -> tuple[int, dict[str, Any]]:
    objects = build(kind)
    restored = ranks.restore(folder, memory, objects)
    state = whole(objects)
    if kind in ("ddp", "fsdp"):
        # It is usable, not just equal: the next step works.
        objects["model"](torch.ones(4, 7)).sum().backward()
        objects["optimizer"].step()
    return restored.step, state


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    objects = build("plain")
    learn(objects)
    return whole(objects)


@pytest.mark.parametrize(
    ("writers", "wrote", "readers", "reads"),
    [
        (4, "fsdp", 2, "fsdp"),
        (2, "fsdp", 8, "fsdp"),
        (2, "ddp", 3, "fsdp"),
        (4, "fsdp", 2, "ddp"),
        (2, "fsdp", 1, "plain"),
        (1, "plain", 2, "fsdp"),
        (2, "ddp", 2, "pipeline"),
        (1, "plain", 3, "pipeline"),
    ],
)
def test_a_checkpoint_fits_another_layout(
    writers: int, wrote: str, readers: int, reads: str, tmp_path: Path, expected: dict[str, Any]
) -> None:
    store, memory = tmp_path / "store", tmp_path / "memory"
    ranks.run(writers, write, store, wrote)
    results = ranks.run(readers, read, store, memory, reads)
    seen: set[str] = set()
    for step, state in results:
        assert step == KEY.step
        assert all(torch.equal(expected[name], tensor) for name, tensor in state.items())
        seen |= state.keys()
    assert seen == expected.keys()
    assert not list(memory.glob("*/restore-*")), "memory is given back"


def pass_on(rank: int, folder: Path, memory: Path, step: int) -> int:
    """Reads, and saves again as it is spread here."""
    objects = build("fsdp")
    restored = ranks.restore(folder, memory, objects)
    ranks.save(PosixStore(folder), ranks.key(step), objects)
    return restored.step


def test_a_checkpoint_goes_from_four_ranks_to_two_to_eight(tmp_path: Path, expected: dict[str, Any]) -> None:
    store = tmp_path / "store"
    ranks.run(4, write, store, "fsdp")
    assert ranks.run(2, pass_on, store, tmp_path / "two", 20) == [KEY.step] * 2
    for step, state in ranks.run(8, read, store, tmp_path / "eight", "fsdp"):
        assert step == 20
        assert ranks.same(expected, state)
