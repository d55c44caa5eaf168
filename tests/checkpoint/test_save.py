"""Distribution of a save: replicas once and spread over ranks, shards where they are, and nothing copied wrong."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.format.manifest import ALIGN, HEADER
from everstep.checkpoint.ranks.topology import Topology
from everstep.checkpoint.save import planning
from everstep.checkpoint.save.planning import WritePlan
from everstep.checkpoint.save.snapshots import Snapshots
from everstep.checkpoint.slots.slots import Slots
from everstep.checkpoint.state.flat import flatten_objects, of_optimizers
from everstep.checkpoint.state.staging import Host
from tests.checkpoint.ranks import run, world_group

pytestmark = pytest.mark.torch


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])


def trained(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return module, optimizer


def plan_of(objects: dict[str, object], rank: int, world: int) -> tuple[WritePlan, dict[str, torch.Tensor]]:
    flat = flatten_objects(objects, rank=rank)
    return planning.make_save_plan(lambda: flat, rank, world_group()), flat.tensors


def written(plan: WritePlan) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(box.tensor, box.offsets, box.sizes) for box in plan.boxes]


def replicas(rank: int, world: int) -> tuple[list[Any], tuple[int, ...]]:
    module, optimizer = trained(DistributedDataParallel(model()))
    plan, _ = plan_of({"model": module, "optimizer": optimizer}, rank, world)
    return written(plan), plan.sizes


def test_replicas_are_written_once_and_spread_evenly() -> None:
    results = run(2, replicas, 2)
    every = [name for boxes, _ in results for name, _, _ in boxes]
    assert len(every) == len(set(every)) == 16 * 4  # weights and biases: themselves, two moments, a step
    sizes = results[0][1]
    assert abs(sizes[0] - sizes[1]) < 0.1 * sizes[0]


class OneByOne(dict[str, torch.Tensor]):
    """A state that is never looked at as a whole: that for each shard would take the square of their number."""

    def __iter__(self) -> Any:
        raise AssertionError("the whole state is looked at for one shard")


def shards(rank: int, world: int) -> list[Any]:
    module = model()
    for layer in module:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    trained(fully_shard(module, mesh=init_device_mesh("cpu", (world,))))
    plan, tensors = plan_of({"model": module}, rank, world)
    sources = plan.sources(OneByOne(tensors))
    assert not any(isinstance(source, DTensor) for source in sources)
    assert [tuple(source.shape) for source in sources] == [box.sizes for box in plan.boxes]
    return written(plan)


def test_each_rank_writes_its_own_shards() -> None:
    first, second = run(2, shards, 2)
    assert {name for name, _, _ in first} == {name for name, _, _ in second}
    weights = [each for each in (*first, *second) if each[0].endswith("0.weight")]
    assert sorted(weights) == [("model.0.weight", (0, 0), (32, 64)), ("model.0.weight", (32, 0), (32, 64))]


def uneven(rank: int, world: int) -> list[Any]:
    """Three rows over four ranks: one rank has none."""
    module = torch.nn.Linear(5, 3, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    return written(plan_of({"model": module}, rank, world)[0])


def test_a_rank_without_an_element_writes_nothing() -> None:
    assert [len(boxes) for boxes in run(4, uneven, 4)] == [1, 1, 1, 0]


def on_one_rank(rank: int, world: int) -> list[str]:
    """Shards that are the whole of their tensor; the names whose bytes are not those of the tensor after a copy."""
    if world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    both = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    hybrid = fully_shard(torch.nn.Linear(4, 3), mesh=both)
    norm = distribute_tensor(torch.arange(5.0), both["replicas"], [Replicate()])
    plan, tensors = plan_of({"model": module, "hybrid": hybrid, "norm": norm}, rank, world)
    sources = plan.sources(tensors)
    targets = [torch.zeros(box.sizes) for box in plan.boxes]
    host = Host()
    host.copy(targets, sources)
    host.close()
    pairs = zip(plan.boxes, targets, strict=True)
    return [box.tensor for box, target in pairs if not torch.equal(target, tensors[box.tensor].to_local())]


@pytest.mark.parametrize("world", [1, 2])
def test_a_shard_that_is_the_whole_tensor_is_copied_from_its_own_memory(world: int) -> None:
    assert run(world, on_one_rank, world) == [[]] * world


def test_a_tensor_without_memory_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="a TwoTensor, which has no memory"):
        flatten_objects({"odd": TwoTensor(torch.ones(4), torch.ones(4))}, rank=0)


def disagreeing(rank: int, world: int) -> str:
    tensors: dict[str, object] = {"a": torch.ones(2)}
    if rank == 1:
        tensors["b"] = torch.ones(2).to_sparse()
    with pytest.raises(CheckpointError) as caught:
        planning.make_save_plan(lambda: flatten_objects(tensors, rank=rank), rank, world_group())
    return str(caught.value)


def test_a_rank_that_cannot_save_fails_the_plan_on_all() -> None:
    first, second = run(2, disagreeing, 2)
    assert first == second
    assert "rank 1 cannot save its state: b is a tensor that is sparse" in first


def test_a_part_begins_with_its_header_and_shards_are_aligned() -> None:
    odd = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5), "c": torch.tensor(1.0), "d": torch.ones(0, 4)}
    plan, _ = plan_of(dict(odd), 0, 1)
    boxes = sorted(plan.boxes, key=lambda box: (box.offset, box.length))
    assert boxes[0].offset == HEADER
    assert all(box.offset % ALIGN == 0 for box in boxes)
    assert all(one.offset + one.length <= two.offset for one, two in pairwise(boxes))
    assert plan.sizes == (max(box.offset + box.length for box in boxes),)
    assert {box.tensor for box in boxes} == set(odd)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state | {"new": torch.ones(1)},
        lambda state: {name: tensor for name, tensor in state.items() if name != "a"},
        lambda state: state | {"a": torch.ones(3)},
        lambda state: state | {"a": state["a"].double()},
    ],
    ids=["another tensor", "one fewer", "another shape", "another type"],
)
def test_another_layout_is_seen(change: Any) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    plan, _ = plan_of(dict(state), 0, 1)
    assert planning.compute_signature({name: tensor + 1 for name, tensor in state.items()}) == plan.signature
    assert planning.compute_signature(change(state)) != plan.signature


SOURCES = [
    torch.arange(3_000_000, dtype=torch.int32),
    torch.randn(1000, 700).t(),
    torch.randn(5, dtype=torch.complex64).conj(),
    torch.tensor(3.5, dtype=torch.bfloat16),
    torch.ones(0, 3),
    torch.randn(2000, 300)[::2],
    *[torch.full((n,), n, dtype=torch.int64) for n in range(1, 50)],
]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_tensor_is_copied_bit_for_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in SOURCES]
    host = Host()
    host.copy(targets, SOURCES)
    host.close()
    for target, source in zip(targets, SOURCES, strict=True):
        assert torch.equal(target.resolve_conj(), source.resolve_conj())


class Recording(Host):
    """Notes what it was told to be steady."""

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], steady: Sequence[bool] = ()
    ) -> None:
        super().copy(targets, sources)
        self.steady = list(steady)


def test_only_what_an_optimizer_holds_is_copied_while_training_goes_on(tmp_path: Path) -> None:
    """The next forward pass changes the statistics of a BatchNorm; nobody knows what changes a copy of the weights."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    module, optimizer = trained(module)
    objects: dict[str, object] = {"model": module, "optimizer": optimizer, "average": copy.deepcopy(module), "x": {}}
    plan, tensors = plan_of(objects, 0, 1)
    slots = Slots.create(tmp_path / "memory", 1)
    slots.reserve(list(plan.sizes), 1)
    staging = Recording()
    snapshots = Snapshots(
        slots, plan, Topology(0, 1, 0, 1, (0,)), "xxh3_64", staging, of_optimizers(objects, rank=0), 2
    )
    snapshots.take(slots[0], Key(Attempt(0, 1), 5), tensors)
    staging.close()
    steady = {box.tensor for box, kept in zip(plan.boxes, staging.steady, strict=True) if kept}
    weights = {f"model.{name}" for name, _ in module.named_parameters()}
    moments = {name for name in tensors if name.startswith("optimizer.")}
    assert len(weights) == 4
    assert len(moments) == 3 * 4
    assert steady == weights | moments
