"""One name is one value: DDP's buffers are those that DDP takes as true, and what differs otherwise is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.save import planning
from everstep.checkpoint.save.outcomes import SaveFailed
from everstep.checkpoint.save.tensor_checksums import checksum_tensors
from everstep.checkpoint.session.checkpointer import Checkpointer
from everstep.checkpoint.state.flat import Flat, flatten_objects
from everstep.checkpoint.state.kinds import FromRank, PerRank
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint import ranks
from tests.checkpoint.text_training import digest

pytestmark = pytest.mark.torch


class Normed(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1), nn.BatchNorm1d(1))

    def forward(self, x: Any) -> Any:
        return self.body(x)


class Outer(nn.Module):  # type: ignore[misc]
    """Has the state of the model within, as what Lightning Fabric's setup() returns."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self._forward_module, self._original_module = wrapped, wrapped.module

    def forward(self, x: Any) -> Any:
        return self._forward_module(x)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self._original_module.state_dict(*args, **options)

    def load_state_dict(self, state: Any, strict: bool = True, **options: Any) -> Any:
        return self._original_module.load_state_dict(state, strict=strict, **options)


class Copied(nn.Module):  # type: ignore[misc]
    """Says copies of its state, under its own names, as to keep it in main memory."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self.inner = wrapped

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {key: each.clone() for key, each in super().state_dict(*args, **options).items()}


def session(folder: Path) -> Checkpointer:
    return everstep.checkpointer(
        folder / "store",
        every_steps=1000,
        memory=everstep.MemoryOptions(directory=folder / "memory"),
        times=everstep.TimeOptions(timeout=60.0, linger=5.0),
    )


def train_normed(rank: int, folder: Path, how: str, first: int, last: int) -> dict[str, Any]:
    """Trains the steps from `first` to `last` with a checkpoint at both ends; the ranks' batches are different."""
    model: Any = DDP(Normed())
    outer = model
    if how == "compiled, inside another module":
        model = torch.compile(model, backend="eager")
        outer = nn.ModuleDict({"encoder": model, "norm": nn.LayerNorm(3)})
    elif how == "saved as the model within":
        outer = Outer(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    with session(folder) as ckpt:
        start = ckpt.restore(model=outer, optimizer=optimizer)
        assert start.step == first
        for step in range(first, last):
            batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank)) * (rank + 1)
            if how == "accumulated":
                with model.no_sync():
                    model(batch.flip(0)).square().sum().backward()
            loss = model(batch).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        state = digest({"model": outer, "optimizer": optimizer})
        ckpt.save(last)
        ckpt.wait()
    return {"losses": losses, "state": state}


@pytest.mark.parametrize(
    "how", ["plain", "compiled, inside another module", "saved as the model within", "accumulated"]
)
def test_ddp_with_batchnorm_resumes_bit_for_bit(how: str, tmp_path: Path) -> None:
    straight = ranks.run(2, train_normed, tmp_path / "straight", how, 0, 8)
    first = ranks.run(2, train_normed, tmp_path / "resumed", how, 0, 5)
    second = ranks.run(2, train_normed, tmp_path / "resumed", how, 5, 8)
    assert straight[0]["state"] != straight[1]["state"], "the ranks' running statistics are not the same"
    for one, begun, ended in zip(straight, first, second, strict=True):
        assert begun["losses"] + ended["losses"] == one["losses"]
        assert ended["state"] == one["state"]


def statistics(rank: int) -> dict[str, Any]:
    """For each kind of model, which of its buffers this rank writes, or why nobody does."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    ignored = Normed()
    DDP._set_params_and_buffers_to_ignore_for_model(ignored, [name for name, _ in ignored.named_buffers()])
    hooked = DDP(Normed())
    hooked._register_buffer_comm_hook(None, lambda state, buffers: None)
    models: dict[str, Callable[[], dict[str, object]]] = {
        "ddp": lambda: {"model": DDP(Normed())},
        "ddp, saved as the model within": lambda: {"model": Outer(DDP(Normed()))},
        "ddp, saved as the model within, in a module": lambda: {"model": nn.ModuleDict({"a": Outer(DDP(Normed()))})},
        "ddp, saved as copies": lambda: {"model": Copied(DDP(Normed()))},
        "ddp of two stages": lambda: {f"stage{rank // 2}": DDP(Normed(), process_group=mine)},
        "ddp of two groups": lambda: {"model": DDP(Normed(), process_group=mine)},
        "not broadcast": lambda: {"model": DDP(Normed(), broadcast_buffers=False)},
        "ignored": lambda: {"model": DDP(ignored)},
        "by a hook": lambda: {"model": hooked},
        "no ddp": lambda: {"model": Normed()},
        "no ddp, from rank 3": lambda: {"model": FromRank(Normed(), rank=3)},
        "no ddp, from rank 9": lambda: {"model": FromRank(Normed(), rank=9)},
        "no ddp, per rank": lambda: {"model": PerRank(Normed())},
    }
    found: dict[str, Any] = {}
    for name, make in models.items():
        objects = make()
        (each,) = objects.values()
        module: Any = getattr(each, "inner", each)
        for buffer in module.buffers():
            buffer.fill_(rank)
        try:
            plan = planning.make_save_plan(
                partial(flatten_objects, objects, rank=rank), rank, ranks.world_group(), compare=True
            )
            found[name] = sorted(box.tensor for box in plan.boxes if "running" in box.tensor)
        except CheckpointError as error:
            found[name] = str(error)
    return found


def test_statistics_come_whole_from_who_owns_them_or_are_refused_with_both_ranks() -> None:
    found = ranks.run(4, statistics)
    buffers = sorted(f"model.body.{layer}.running_{kind}" for layer in (1, 4) for kind in ("mean", "var"))
    stages = [sorted(each.replace("model", f"stage{i}") for each in buffers) for i in (0, 1)]
    assert [each["ddp"] for each in found] == [buffers, [], [], []]
    assert [each["ddp, saved as the model within"] for each in found] == [buffers, [], [], []]
    for how, path in (("saved as the model within, in a module", "a"), ("saved as copies", "inner")):
        longer = [each.replace("model", f"model.{path}") for each in buffers]
        assert [each[f"ddp, {how}"] for each in found] == [longer, [], [], []]
    assert [each["ddp of two stages"] for each in found] == [stages[0], [], stages[1], []]
    assert [each["no ddp, from rank 3"] for each in found] == [[], [], [], buffers]
    assert [len(each["no ddp, per rank"]) for each in found] == [4] * 4
    for how, others in (
        ("ddp of two groups", 2), ("not broadcast", 1), ("ignored", 1), ("by a hook", 1), ("no ddp", 1),
    ):  # fmt: skip
        words = {each[how] for each in found}
        assert len(words) == 1, "all ranks are told the same"
        told = words.pop()
        assert "model.body.1.running_mean (and 5 more tensors) differs" in told
        assert all(part in told for part in ("rank 0 has the checksum", f"rank {others} has", "FromRank", "PerRank"))
    assert all("rank that it is to come from is none of 0 to 3" in each["no ddp, from rank 9"] for each in found)


def unlike(rank: int, folder: Path) -> dict[str, Any]:
    """Ranks whose weights differ under one name, as those of experts; and the two ways to save them nevertheless."""
    found: dict[str, Any] = {}
    for how in ("one name", "per rank", "names of their own"):
        expert = nn.Linear(3, 2)
        with torch.no_grad():
            expert.weight.fill_(rank + 1)
        optimizer = torch.optim.SGD(expert.parameters(), lr=0.1, momentum=0.9)
        expert(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        objects: dict[str, Any] = {"expert": expert, "optimizer": optimizer}
        if how == "per rank":
            objects = {name: PerRank(each) for name, each in objects.items()}
        elif how == "names of their own":
            objects = {f"{name}{rank}": each for name, each in objects.items()}
        held = digest({"expert": expert, "optimizer": optimizer})
        ckpt = session(folder / how)
        ckpt.track(**objects)
        ckpt.save(1)
        try:
            ckpt.wait()
        except CheckpointError as error:
            found[how] = str(error)
        ckpt.close(wait=how != "one name")
        if how == "one name":
            continue
        with torch.no_grad():
            for each in (*expert.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())):
                each.zero_()
        with session(folder / how) as ckpt:
            assert ckpt.restore(**objects).step == 1
        found[how] = digest({"expert": expert, "optimizer": optimizer}) == held
    return found


def test_ranks_that_differ_under_one_name_are_refused_and_saved_as_what_each_has(tmp_path: Path) -> None:
    found = ranks.run(2, unlike, tmp_path)
    for each in found:
        assert "expert.weight differs between ranks" in each["one name"]
        assert "rank 0 has the checksum" in each["one name"]
        assert "rank 1 has" in each["one name"]
        assert (each["per rank"], each["names of their own"]) == (True, True)
    assert not list(PosixStore(tmp_path / "one name" / "store").list("manifests/")), "nothing was committed"


def saves_after_rejections(rank: int, folder: Path) -> list[int | None]:
    failed: list[int | None] = []
    ckpt = session(folder)
    ckpt.on("failed", lambda event: failed.append(event.key.step if event.key else None))
    ckpt.track(state={"weights": torch.full((4,), float(rank))})
    ckpt.save(1)
    ckpt.step(2)  # tries again, and decides that the next step does
    ckpt.save(3)  # comes before that
    with pytest.raises(SaveFailed, match="differs between ranks"):
        ckpt.close()
    return failed


def test_what_differs_is_refused_by_each_call_that_saves_however_they_follow(tmp_path: Path) -> None:
    assert ranks.run(2, saves_after_rejections, tmp_path) == [[1, 2, 3], [1, 2, 3]]
    assert everstep.list_checkpoints(tmp_path / "store") == []


def saves_while_it_grows(rank: int, folder: Path) -> list[int | None]:
    failed: list[int | None] = []
    state = {"weights": torch.zeros(4)}
    with session(folder) as ckpt:
        ckpt.on("failed", lambda event: failed.append(event.key.step if event.key else None))
        ckpt.track(state=state)
        ckpt.save(1)
        state["weights"].fill_(rank)
        state["history"] = torch.zeros(2)
        ckpt.save(2)
        del state["history"]  # what was planned for the first save is the plan of this state too
        ckpt.save(3)
        state["weights"].fill_(4)
        ckpt.save(4)
    return failed


def test_what_differs_when_a_state_has_grown_is_refused_when_it_is_as_before_too(tmp_path: Path) -> None:
    assert ranks.run(2, saves_while_it_grows, tmp_path) == [[2, 3], [2, 3]]
    assert [each.step for each in everstep.list_checkpoints(tmp_path / "store")] == [4, 1]


def listed(rank: int) -> list[str]:
    """Names of tensors of which our list of boxes is not that of torch's own planner."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    four = init_device_mesh("cpu", (4,))
    tensors: dict[str, torch.Tensor] = {
        "plain": torch.ones(3, 2),
        "number": torch.tensor(1.0),
        "empty": torch.ones(0, 3),
    }
    for rows in (1, 2, 3, 4, 7, 8, 13):
        whole = torch.arange(rows * 6.0).view(rows, 6)
        for name, mesh, placements in (
            ("rows", four, [Shard(0)]), ("columns", four, [Shard(1)]), ("grid", two, [Shard(0), Shard(1)]),
            ("twice", two, [Shard(0), Shard(0)]), ("replicas", two, [Replicate(), Shard(0)]),
            ("replicated", two, [Shard(1), Replicate()]), ("half", two["a"], [Shard(0)]),
        ):  # fmt: skip
            tensors[f"{name}{rows}"] = distribute_tensor(whole, mesh, placements)
    tensors["strided"] = distribute_tensor(
        torch.arange(64.0).view(8, 8), two, [_StridedShard(0, split_factor=2), Shard(0)]
    )
    module = fully_shard(nn.Linear(6, 7), mesh=two)
    tensors.update({f"fsdp.{name}": each for name, each in module.state_dict().items()})
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), None, is_coordinator=rank == 0)
    theirs = {item.index.fqn: item.tensor_data for item in planner.create_local_plan().items}
    ours = planning.list_boxes(Flat(tensors, {}), rank)
    different = [
        piece.name
        for piece in ours
        if (piece.shape, piece.offsets, piece.sizes)
        != (
            tuple(theirs[piece.name].size),
            *map(tuple, (theirs[piece.name].chunk.offsets, theirs[piece.name].chunk.sizes)),
        )
        and 0 not in piece.sizes
    ]
    return different + sorted(theirs.keys() ^ {piece.name for piece in ours})


def test_the_boxes_of_a_rank_are_those_of_torch_own_planner() -> None:
    assert ranks.run(4, listed) == [[]] * 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4).t().contiguous().t()),
        (torch.randn(5, dtype=torch.complex64).conj(), None),
        (torch.tensor([float("nan"), 1.0]), None),
        (torch.ones(3, dtype=torch.bfloat16), None),
        (torch.tensor(True), None),
        (torch.ones(0, 3), torch.ones(4, 0)),
        (torch.ones(1, 3).expand(4, 3), torch.ones(4, 3)),
    ],
    ids=["transposed", "conjugate", "nan", "bfloat16", "a bool", "empty", "expanded"],
)
def test_equal_elements_have_equal_checksums(one: torch.Tensor, other: torch.Tensor | None) -> None:
    same = one.clone(memory_format=torch.contiguous_format).resolve_conj() if other is None else other
    assert checksum_tensors([one]) == checksum_tensors([same])


def test_every_bit_of_a_tensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.checkpoint.save.tensor_checksums.PIECE", 64)
    tensor = torch.zeros(7, 33).t()
    before = checksum_tensors([tensor])
    for place in ((0, 0), (32, 6), (17, 3)):
        changed = tensor.clone()
        changed[place] = -0.0
        assert checksum_tensors([changed]) != before
    assert checksum_tensors([tensor.contiguous()]) == before
