"""Ranks that load a sharded model together hold one checkpoint, whichever of them finds what is wrong with another."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep
from everstep.checkpoint.catalog.selection import NoSuchStep
from everstep.checkpoint.errors import CheckpointError, RankLost
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.load import load_ranks
from everstep.checkpoint.restore.restorer import NoGoodCheckpoint
from everstep.checkpoint.state.kinds import StateMismatch
from everstep.checkpoint.store.posix import PosixStore
from everstep.checkpoint.store.retry import Retry
from everstep.checkpoint.store.s3 import S3Store
from tests.checkpoint import ranks

pytestmark = pytest.mark.torch

OLD, NEW = ranks.key(5, generation=1), ranks.key(5, generation=2)  # one step, which two attempts have


def filled(layout: str, value: float) -> dict[str, Any]:
    """A model of which each rank holds a piece: of each tensor, or a stage of which nobody else has anything."""
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    if layout == "sharded":
        fully_shard(model)
        return {"model": model}
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    return {f"stage{dist.get_rank()}": model}


def held(objects: dict[str, Any]) -> set[float]:
    (model,) = objects.values()
    return {float(each) for param in model.parameters() for each in param.to_local().flatten()}


def save_both(folder: Path, layout: str) -> None:
    for value, key in ((1.0, OLD), (2.0, NEW)):
        ranks.save(PosixStore(folder), key, filled(layout, value))


def damage(folder: Path, key: Key, rank: int) -> None:
    part = folder / key.part_name(rank)
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)


def falls_back(rank: int, folder: Path, layout: str, step: int | None) -> tuple[str, set[float], dict[str, str]]:
    save_both(folder, layout)
    if rank == 0:
        damage(folder, NEW, 1)  # a file that rank 1 alone reads
    dist.barrier()
    objects = filled(layout, 0.0)
    restored = everstep.load_into(folder, step=step, **objects)
    return str(restored.key), held(objects), restored.fell_back


@pytest.mark.parametrize("step", [None, 5], ids=["newest", "one step"])
@pytest.mark.parametrize("layout", ["sharded", "stages"])
def test_what_is_bad_for_one_rank_is_passed_over_by_all(layout: str, step: int | None, tmp_path: Path) -> None:
    first, second = ranks.run(2, falls_back, tmp_path, layout, step)
    assert first == second
    key, values, fell_back = first
    assert (key, values) == (str(OLD), {1.0})
    assert "rank 1: " in fell_back[str(NEW)]


def fails(rank: int, folder: Path) -> list[tuple[str, str]]:
    save_both(folder, "sharded")
    objects = filled("sharded", 0.0)
    found = []

    def attempt(**options: Any) -> None:
        try:
            everstep.load_into(folder, **{**objects, **options})
        except CheckpointError as error:
            found.append((type(error).__name__, str(error)))

    attempt(strict=rank == 0)
    attempt(step=7)
    attempt(model=fully_shard(nn.Linear(9, 9))) if rank == 1 else attempt()
    dist.barrier()
    if rank == 0:
        damage(folder, NEW, 1)
    dist.barrier()
    attempt(step=NEW)
    assert held(objects) == {0.0}
    everstep.load_into(folder, **objects)
    assert held(objects) == {1.0}, "the next call is not confused by those before"
    return found


def test_what_one_rank_cannot_do_is_an_error_of_all_that_touches_nothing(tmp_path: Path) -> None:
    first, second = ranks.run(2, fails, tmp_path)
    assert first[0] == second[0]
    assert "load_into() was given strict=True on rank 0 and strict=False on rank 1" in first[0][1]
    assert first[1] == second[1]
    assert first[1][0] == NoSuchStep.__name__
    assert "rank 1: " in first[2][1]
    assert second[2][0] == StateMismatch.__name__
    assert first[-1] == second[-1]
    assert first[-1][0] == NoGoodCheckpoint.__name__
    assert "rank 1: " in first[-1][1]


def waits(rank: int, folder: Path) -> str:
    load_ranks.PATIENCE_SECONDS = 2.0
    save_both(folder, "sharded")
    objects = filled("sharded", 0.0)
    told = ""
    if rank == 0:
        with pytest.raises(RankLost) as caught:
            everstep.load_into(folder, **objects)
        told = str(caught.value)
    dist.barrier()
    assert held(objects) == {0.0}
    return told


def test_a_rank_that_does_not_come_is_named_within_a_bounded_time(tmp_path: Path) -> None:
    first, _ = ranks.run(2, waits, tmp_path)
    assert first.startswith("rank 1 gave no sign of life for 2 s")


def loads_alone(rank: int, folder: Path) -> list[float]:
    """A rank loads values that it has whole without the others, also while those are busy."""
    ranks.save(PosixStore(folder), OLD, {"weights": {"one": torch.ones(3)}})
    weights = {"one": torch.zeros(3)}
    if rank == 1:
        everstep.load_into(folder, weights=weights)
    return list(weights["one"].tolist())


def test_what_is_not_sharded_one_rank_loads_by_itself(tmp_path: Path) -> None:
    assert ranks.run(2, loads_alone, tmp_path) == [[0.0] * 3, [1.0] * 3]


def loads_in_groups(rank: int, folder: Path) -> list[set[float]]:
    """Rank 0 loads with rank 1 in one process group and with rank 2, which has loaded nothing, in the next one."""
    load_ranks.PATIENCE_SECONDS = 10.0
    save_both(folder, "sharded")
    dist.destroy_process_group()
    found = []
    for other in (1, 2):
        if rank in (0, other):
            number = int(rank != 0)
            dist.init_process_group("gloo", init_method=f"file://{folder / str(other)}", rank=number, world_size=2)
            objects = filled("sharded", 0.0)
            everstep.load_into(folder, **objects)
            found.append(held(objects))
            dist.barrier()
            dist.destroy_process_group()
    return found


def test_a_process_that_has_loaded_in_another_group_loads_with_one_that_is_new(tmp_path: Path) -> None:
    assert ranks.run(3, loads_in_groups, tmp_path) == [[{2.0}] * 2, [{2.0}], [{2.0}]]


def test_ranks_wait_for_one_whose_store_does_not_answer_until_it_has_heard_so() -> None:
    silence = inspect.signature(S3Store).parameters["read_timeout"].default
    retry = Retry()
    pauses = sum(min(retry.longest, retry.first * 2**number) for number in range(retry.tries))
    assert retry.tries * silence + pauses < load_ranks.PATIENCE_SECONDS
