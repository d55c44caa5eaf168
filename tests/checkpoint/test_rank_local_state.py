"""Optimizers of sharded parameters whose state is no DTensor of their shape: it comes back to fresh processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.save import planning
from everstep.checkpoint.state import shards
from everstep.checkpoint.state.flat import flatten_objects
from everstep.checkpoint.state.kinds import PerRank, StateMismatch
from everstep.checkpoint.state.memory import get_local_tensor
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint import ranks

pytestmark = pytest.mark.torch


class OfShards(torch.optim.Optimizer):  # type: ignore[misc]
    """Knows its own shards alone, and makes no state where it has no element of a parameter."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "is_momentum_kept": True})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                here = get_local_tensor(param)
                if param.grad is not None and here.numel():
                    state = self.state[param]
                    here.sub_(self.direction(state, here, get_local_tensor(param.grad)), alpha=group["lr"])
                    state["step"] = state.get("step", torch.tensor(0.0)) + 1

    def direction(self, state: dict[str, Any], here: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Momentum(OfShards):
    """Keeps momentum of the shape of its shard in 64 bits, its signs in 8, text, and an array."""

    def direction(self, state: dict[str, Any], here: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if not state:
            state["kept"] = [torch.zeros_like(here, dtype=torch.float64), torch.zeros_like(here, dtype=torch.uint8)]
            state["rule"] = "heavy ball"
            state["table"] = np.arange(3.0)
        momentum, signs = state["kept"]
        momentum.mul_(0.9).add_(grad / 3)
        signs.copy_(momentum > 0)
        return (momentum * (1 + signs)).to(here.dtype)


class Factored(OfShards):
    """Keeps averages of the rows and columns of its shard beside a momentum of its shape."""

    def direction(self, state: dict[str, Any], here: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        matrix = grad.reshape(len(grad), -1).square()
        if not state:
            state["row"], state["column"] = torch.zeros(matrix.shape[0]), torch.zeros(matrix.shape[1])
            state["momentum"] = torch.zeros_like(here)
        state["row"].lerp_(matrix.mean(1), 0.1)
        state["column"].lerp_(matrix.mean(0), 0.1)
        factor = (state["row"][:, None] + state["column"]).add(1e-6).rsqrt()
        return state["momentum"].mul_(0.9).add_(grad * factor.reshape(grad.shape))


class Rows(OfShards):
    """Keeps an average of each row: where a rank has one row, its shape is that of a number or of the shard."""

    def direction(self, state: dict[str, Any], here: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        matrix = grad.reshape(len(grad), -1).square()
        if not state:
            state["row"], state["mean"] = torch.zeros(len(matrix)), torch.zeros(1, matrix.shape[1])
        state["row"].lerp_(matrix.mean(1), 0.1)
        state["mean"].lerp_(matrix.mean(0, keepdim=True), 0.1)
        return grad / (1e-3 + state["row"].reshape(-1, *[1] * (grad.dim() - 1))).sqrt() + state["mean"].mean()


def of_the_last(groups: Any) -> OfShards:
    """Momentum of parameters of which one rank has everything and the others nothing."""
    return Momentum([each for group in groups for each in group["params"] if each.shape[0] == 1])


class Scaled(OfShards):
    """Keeps a number for its shard, which nobody can tell from one that all ranks have, and a sharded momentum."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for param in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state = self.state[param]
            if not state:
                state["scale"], state["momentum"] = torch.tensor(1.0), torch.zeros_like(param)
            state["scale"].add_(get_local_tensor(param.grad).square().sum())
            state["momentum"].mul_(0.9).add_(param.grad)
            get_local_tensor(param).sub_(get_local_tensor(state["momentum"]) / state["scale"], alpha=0.01)


class OfMesh(torch.optim.Optimizer):  # type: ignore[misc]
    """Keeps averages of the rows and columns of whole parameters: DTensors that are not of the parameter's shape."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for param in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            matrix = param.grad.reshape(param.shape[0], -1).square()
            row, column = matrix.mean(1), matrix.mean(0)
            column = column.redistribute(column.device_mesh, [dist.tensor.Replicate()] * column.device_mesh.ndim)
            state = self.state[param]
            state["row"] = state["row"] * 0.9 + row if "row" in state else row
            state["column"] = state["column"] * 0.9 + column if "column" in state else column
            size = (1 + state["row"].sum() + state["column"].sum()).full_tensor()
            param.sub_(param.grad * size.rsqrt() * 0.01)


def make(kind: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of weights and biases, of which two ranks have uneven shards, and one of them nothing of the last."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    weights = [each for each in model.parameters() if each.dim() == 2]
    biases = [each for each in model.parameters() if each.dim() == 1]
    return model, kind([{"params": biases, "lr": 0.02}, {"params": weights}])


def train(rank: int, folder: Path, kind: Any, is_own: bool, first: int, last: int) -> list[bytes]:
    """Trains the steps from `first` to `last` of a checkpoint and saves one; what this rank has of everything then."""
    model, optimizer = make(kind)
    objects: dict[str, object] = {"model": model, "optimizer": PerRank(optimizer) if is_own else optimizer}
    if first:
        assert ranks.restore(folder, folder / "memory", objects).step == first
    for step in range(first, last):
        model[0].bias.requires_grad_(step > 1)  # its state is made when others have some already
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ranks.save(PosixStore(folder), ranks.key(last), objects)
    tensors = [*model.parameters(), *(each for _, own in sorted_state(optimizer) for each in own)]
    return [content(each) if isinstance(each, torch.Tensor) else repr(each).encode() for each in tensors]


def sorted_state(optimizer: torch.optim.Optimizer) -> list[tuple[int, list[Any]]]:
    """The leaves of each parameter's state by its place, in an order of their own."""
    flat = {
        place: [leaf for _, each in sorted(own.items()) for leaf in (each if isinstance(each, list) else [each])]
        for place, own in optimizer.state_dict()["state"].items()
    }
    return sorted(flat.items())


def content(tensor: torch.Tensor) -> bytes:
    here = get_local_tensor(tensor.detach())
    return f"{type(tensor).__name__} {here.dtype} {list(here.shape)}".encode() + bytes(here.numpy().tobytes())


@pytest.mark.parametrize(
    ("kind", "is_own"),
    [
        (Momentum, False),
        (Factored, False),
        (Rows, False),
        (of_the_last, False),
        (OfMesh, False),
        (Scaled, True),
        (OfMesh, True),
    ],
)
def test_state_that_is_not_sharded_as_its_parameters_comes_back_to_fresh_processes(
    kind: Any, is_own: bool, tmp_path: Path
) -> None:
    straight = ranks.run(2, train, tmp_path / "straight", kind, is_own, 0, 6)
    ranks.run(2, train, tmp_path / "resumed", kind, is_own, 0, 3)
    assert ranks.run(2, train, tmp_path / "resumed", kind, is_own, 3, 6) == straight
    assert straight[0] != straight[1]


def gathered(rank: int, folder: Path, kind: Any) -> dict[str, Any]:
    """All of the state that a fresh process is given, put together again."""
    model, optimizer = make(kind)
    ranks.restore(folder, folder / f"memory-{dist.get_world_size()}", {"model": model, "optimizer": optimizer})
    found: dict[str, Any] = {}
    for place, own in sorted_state(optimizer):
        for number, each in enumerate(own):
            if hasattr(each, "full_tensor"):
                each = each.full_tensor()
            found[f"{place}.{number}"] = each.tolist() if isinstance(each, torch.Tensor) else each
    return found


def test_what_is_sharded_comes_back_on_another_number_of_ranks(tmp_path: Path) -> None:
    ranks.run(2, train, tmp_path, OfMesh, False, 0, 3)
    two, three = ranks.run(2, gathered, tmp_path, OfMesh), ranks.run(3, gathered, tmp_path, OfMesh)
    assert len(two[0]) >= 8
    assert [two[0]] * 5 == [*two, *three]


def refusal(rank: int, folder: Path, kind: Any) -> str:
    try:
        gathered(rank, folder, kind)
    except StateMismatch as error:
        return str(error)
    return "restored"


def test_what_each_rank_keeps_for_itself_is_refused_elsewhere_with_its_name_and_what_to_do(tmp_path: Path) -> None:
    ranks.run(2, train, tmp_path, Factored, False, 0, 3)
    for told in ranks.run(3, refusal, tmp_path, Factored):
        assert "optimizer.state.0.bias.column is state that each rank keeps for its own shard" in told
        assert "restore on as many ranks" in told
        assert "or leave the optimizer out of restore()" in told
        assert "[0:2, 0:6] of the parameter's [3, 6], and this rank has [0:1, 0:6]" in told


def first_plan(rank: int, is_own: bool) -> str:
    model, optimizer = make(Scaled)
    model(torch.full((2, 6), rank + 1.0)).square().sum().backward()
    optimizer.step()
    objects = {"model": model, "optimizer": PerRank(optimizer) if is_own else optimizer}
    try:
        planning.make_save_plan(lambda: flatten_objects(objects, rank=rank), rank, ranks.world_group(), compare=True)
    except CheckpointError as error:
        return str(error)
    return "planned"


def test_numbers_that_each_rank_keeps_for_itself_are_refused_at_the_first_save_with_advice() -> None:
    for told in ranks.run(2, first_plan, False):
        assert "optimizer.state." in told
        assert "PerRank" in told
    assert ranks.run(2, first_plan, True) == ["planned"] * 2


def train_on_mesh(rank: int, folder: Path, kind: Any, first: int, last: int) -> list[bytes]:
    """The same on two ranks of data and two of tensor parallelism, where shards of shards are strided."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = kind(model.parameters(), lr=0.01)
    objects: dict[str, object] = {"model": model, "optimizer": PerRank(optimizer)}
    if first:
        assert ranks.restore(folder, folder / "memory", objects).step == first
    for step in range(first, last):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank // 2))
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ranks.save(PosixStore(folder), ranks.key(last), objects)
    tensors = [*model.parameters(), *(each for _, own in sorted_state(optimizer) for each in own)]
    return [f"{getattr(each, 'placements', None)}".encode() + content(each) for each in tensors]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OfMesh])
def test_each_ranks_own_state_comes_back_with_the_placements_that_it_had_on_a_mesh(kind: Any, tmp_path: Path) -> None:
    straight = ranks.run(4, train_on_mesh, tmp_path / "straight", kind, 0, 4)
    ranks.run(4, train_on_mesh, tmp_path / "resumed", kind, 0, 2)
    assert ranks.run(4, train_on_mesh, tmp_path / "resumed", kind, 2, 4) == straight
    assert any(b"_StridedShard" in each for each in straight[0])


def laid_out(rank: int, said: list[list[list[Any]]]) -> list[str]:
    """Placements of a rank's own shard that was laid out as was said beside a parameter, or why it cannot be."""
    mesh = dist.init_device_mesh("cpu", (2, 2))
    param = dist.tensor.distribute_tensor(torch.zeros(8, 4), mesh, [dist.tensor.Replicate(), dist.tensor.Shard(0)])
    found = []
    for placements in said:
        layout = {"placements": placements, "shape": [8, 4]}
        why = shards.why_not_laid_out(param, (2, 4), layout)
        try:
            told = str(shards.lay_out(param, torch.zeros(2, 4), layout).placements)
        except CheckpointError as error:
            told = f"refused: {error}"
        assert (why is not None) == told.startswith("refused")
        found.append(told)
    return found


def test_placements_are_known_as_any_version_of_torch_shows_them_and_others_are_refused() -> None:
    after = ["shard", 0]
    good = [[["other", shown], after] for shown in ("_S(0, 2)", "_StridedShard(dim=0, sf=2)")]
    bad = [[["other", shown], after] for shown in ("_S(0, 4)", "Diagonal(3)", "_MaskPartial(sum)")] + [[["shard", 0]]]
    for told in ranks.run(4, laid_out, [*good, *bad]):
        assert len(set(told[:2])) == 1
        assert told[0].startswith("(_StridedShard(dim=0, sf=2), Shard(dim=0))")
        assert all("which does not fit a mesh of [2, 2]" in each for each in told[2:])
