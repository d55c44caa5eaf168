"""A checkpoint is read by anybody: without ranks, beside a live run, in part, under other names and types."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.catalog.candidates import list_candidates, read_manifest  # noqa: E402
from everstep.checkpoint.catalog.selection import NoSuchStep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError, StoreError  # noqa: E402
from everstep.checkpoint.exchange.exporting import export_dcp  # noqa: E402
from everstep.checkpoint.exchange.importing import import_torch  # noqa: E402
from everstep.checkpoint.format.keys import Attempt, Key  # noqa: E402
from everstep.checkpoint.restore.restorer import NoGoodCheckpoint  # noqa: E402
from everstep.checkpoint.state.kinds import PerRank, StateMismatch  # noqa: E402
from everstep.checkpoint.state.rng import Rng  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session, state  # noqa: E402
from tests.checkpoint.writers import until  # noqa: E402

pytestmark = pytest.mark.torch


def network(seed: int = 0, dtype: Any = None) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype=dtype)


def trained(seed: int = 0) -> dict[str, Any]:
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.rand(5, 6)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def saved(folder: Path, *keys: Key, **objects: Any) -> dict[str, Any]:
    made = objects or trained()
    for key in keys or (ranks.key(1),):
        ranks.save(PosixStore(folder), key, dict(made))
    return made


def same(one: Any, other: Any) -> bool:
    return ranks.same(dict(one), dict(other))


def test_what_load_returns_is_what_load_state_dict_takes(tmp_path: Path) -> None:
    objects = saved(tmp_path)
    loaded = everstep.load(tmp_path)
    assert (loaded.step, sorted(loaded)) == (1, ["model", "optimizer", "scheduler"])
    other = trained(seed=1)
    other["model"].load_state_dict(loaded["model"])
    other["scheduler"].load_state_dict(loaded["scheduler"])
    assert same(other["model"].state_dict(), objects["model"].state_dict())
    assert other["scheduler"].state_dict() == objects["scheduler"].state_dict()
    optimizer = loaded["optimizer"]
    assert torch.equal(
        optimizer["state"]["0.weight"]["exp_avg"], objects["optimizer"].state_dict()["state"][0]["exp_avg"]
    )
    assert optimizer["param_groups"][0]["lr"] == 0.125
    assert optimizer["param_groups"][0]["params"] == [name for name, _ in objects["model"].named_parameters()]


def in_groups(model: nn.ModuleList) -> Any:
    """The groups of an optimizer in another order than the model's, and than that of names."""
    return torch.optim.AdamW(
        [{"params": [*model[1::2].parameters()]}, {"params": [*model[::2].parameters()], "lr": 0.5}]
    )


def by_one_rank(folder: Path, model: Any, optimizer: Any) -> None:
    saved(folder, model=model, optimizer=optimizer)


def by_an_import(folder: Path, model: Any, optimizer: Any) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder.with_suffix(".pt"))
    held = [each for group in optimizer.param_groups for each in group["params"]]
    order = [next(name for name, each in model.named_parameters() if each is param) for param in held]
    import_torch(folder.with_suffix(".pt"), folder, optimizer_order=order)


@pytest.mark.parametrize("save", [by_one_rank, by_an_import])
def test_a_loaded_optimizer_goes_into_torchs_own_by_the_order_of_its_parameters(tmp_path: Path, save: Any) -> None:
    """torch compares no shapes there: in the order of names, layer 10 would have the averages of layer 2."""

    def start() -> tuple[Any, Any]:
        model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(12))
        return model, in_groups(model)

    model, optimizer = start()
    for number, layer in enumerate(model):
        layer.weight.grad = torch.full((2, 2), float(number))
    optimizer.step()
    save(tmp_path / "store", model, optimizer)
    loaded = everstep.load(tmp_path / "store")
    model, optimizer = start()
    optimizer.load_state_dict(loaded["optimizer"])
    averages = [optimizer.state[layer.weight]["exp_avg"][0, 0].item() for layer in model]
    assert averages == pytest.approx([0.1 * number for number in range(12)])
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.5]


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    saved(tmp_path, big=torch.rand(1 << 20), small={"a": torch.rand(3), "b": torch.rand(3)})
    manifest = read_manifest(PosixStore(tmp_path), ranks.key(1))
    part = tmp_path / manifest.parts[0].name
    chunk = manifest.tensors["big"].shards[0].chunks[0]
    with part.open("r+b") as opened:
        opened.seek(chunk.offset)
        opened.write(b"damaged")
    assert sorted(everstep.load(tmp_path, only="small.*")["small"]) == ["a", "b"]
    assert list(everstep.load(tmp_path, only=["small.a"])["small"]) == ["a"]
    with pytest.raises(NoGoodCheckpoint, match=r"not those that were written"):
        everstep.load(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"nothing in checkpoint .* is called 'mdel.*'; the objects in it are big, small"
    ):
        everstep.load(tmp_path, only="mdel.*")


def test_a_step_is_that_of_the_greatest_attempt_that_has_it_and_is_good(tmp_path: Path) -> None:
    for generation, step in ((1, 10), (1, 20), (2, 10), (3, 10)):
        saved(tmp_path, ranks.key(step, generation), x=torch.full((4,), float(100 * generation + step)))
    damaged = tmp_path / read_manifest(PosixStore(tmp_path), ranks.key(10, 3)).parts[0].name
    damaged.write_bytes(damaged.read_bytes()[:-8] + b"damaged!")
    loaded = everstep.load(tmp_path, step=10)
    assert (loaded["x"][0].item(), list(loaded.fell_back)) == (210.0, [str(ranks.key(10, 3))])
    assert everstep.load(tmp_path, step=ranks.key(10, 1))["x"][0] == 110
    assert everstep.load(tmp_path, step=20)["x"][0] == 120
    with pytest.raises(NoSuchStep, match=r"no checkpoint of step 15 in .*; there are 10, 20") as error:
        everstep.load(tmp_path, step=15)
    assert error.value.steps == [10, 20]
    with pytest.raises(CheckpointError, match=r"there are no checkpoints in"):
        everstep.load(tmp_path / "nowhere")


@pytest.mark.parametrize("step", ["3", 3.0, True, b"3"])
def test_a_step_of_another_type_is_named(step: Any, tmp_path: Path) -> None:
    saved(tmp_path, ranks.key(3), x=torch.ones(3))
    number: Any = np.int64(3)
    assert everstep.load(tmp_path, step=number).step == 3
    for read in (
        everstep.load,
        partial(everstep.load_into, x=torch.ones(3)),
        partial(export_dcp, folder=tmp_path / "o"),
    ):
        with pytest.raises(TypeError, match=rf"step is {re.escape(repr(step))}, a {type(step).__name__}: give the num"):
            read(tmp_path, step=step)


def test_no_reads_at_a_time_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for threads in (0, -1):
        for read in (everstep.load, partial(everstep.load_into, x=torch.ones(3))):
            with pytest.raises(ValueError, match=rf"threads is {threads}, and how many reads .* at least 1"):
                read(tmp_path, threads=threads)


def test_names_and_types_are_changed_on_the_way(tmp_path: Path) -> None:
    model = saved(tmp_path)["model"]
    loaded = everstep.load(tmp_path, only="model.*", rename={"model.0.": "model.first."}, cast=torch.bfloat16)
    assert torch.equal(loaded["model"]["first.weight"], model[0].weight.bfloat16())
    assert loaded["model"]["1.num_batches_tracked"].dtype is torch.int64
    loaded = everstep.load(tmp_path, only="model.*", rename=lambda name: None if "running" in name else name.upper())
    assert "0.WEIGHT" in loaded["MODEL"]
    assert not any("RUNNING" in name for name in loaded["MODEL"])
    shapes = everstep.load(tmp_path, only="model.*", map_location="meta")["model"]
    assert (shapes["0.weight"].is_meta, shapes["0.weight"].shape) == (True, (4, 6))
    with pytest.raises(CheckpointError, match=r"the same name model.x"):
        everstep.load(tmp_path, rename=lambda name: "model.x" if name.startswith("model") else None)


def test_shapes_alone_are_told_of_arrays_and_bytes_too_and_nothing_is_read(tmp_path: Path) -> None:
    big = {
        "array": np.zeros((30, 40), "f4"), "fortran": np.zeros((30, 40), "f8", order="F"), "bytes": bytes(3000),
        "dates": np.zeros((40, 20), "M8[D]"), "small": np.ones(3), "tensor": torch.rand(500),
    }  # fmt: skip
    saved(tmp_path, big=big, rng=PerRank(Rng()), model=network())
    part = next((tmp_path / "data").rglob("*.part"))
    part.write_bytes(bytes(part.stat().st_size))
    shapes = everstep.load(tmp_path, map_location="meta")
    found = shapes["big"]
    assert found.pop("small").tolist() == [1, 1, 1], "what is in the manifest is there"
    assert all(each.is_meta for each in found.values())
    assert {name: (tuple(each.shape), each.dtype) for name, each in found.items()} == {
        "array": ((30, 40), torch.float32), "fortran": ((30, 40), torch.float64), "bytes": ((3000,), torch.uint8),
        "dates": ((6400,), torch.uint8), "tensor": ((500,), torch.float32),
    }  # fmt: skip
    assert shapes["model"]["0.weight"].is_meta


def test_a_cast_of_floating_tensors_leaves_arrays_as_they_are(tmp_path: Path) -> None:
    array = np.linspace(0, 1, 1500)
    saved(tmp_path, state={"array": array, "tensor": torch.linspace(0, 1, 1500)})
    found = everstep.load(tmp_path, cast=torch.bfloat16)["state"]
    assert np.array_equal(found["array"], array)
    assert found["tensor"].dtype is torch.bfloat16


def test_odd_tensors_come_back(tmp_path: Path) -> None:
    odd = {
        "empty": torch.empty(0, 3), "scalar": torch.tensor(3.5), "half": torch.rand(5).bfloat16(),
        "complex": torch.rand(3, dtype=torch.complex64), "bool": torch.tensor([True, False]),
    }  # fmt: skip
    saved(tmp_path, odd=odd, listed={"items": [torch.ones(2), torch.zeros(1)], "n": 3})
    loaded = everstep.load(tmp_path)
    assert same(loaded["odd"], odd)
    assert [each.tolist() for each in loaded["listed"]["items"]] == [[1.0, 1.0], [0.0]]
    assert loaded["listed"]["n"] == 3


def test_load_into_fills_the_objects_own_memory(tmp_path: Path) -> None:
    objects, others = saved(tmp_path), trained(seed=1)
    memory = others["model"][0].weight.data_ptr()
    restored = everstep.load_into(tmp_path, **others)
    assert (restored.step, restored.missing, restored.unexpected) == (1, (), ())
    assert others["model"][0].weight.data_ptr() == memory
    assert same(others["model"].state_dict(), objects["model"].state_dict())
    ours, theirs = (each["optimizer"].state_dict()["state"][0] for each in (objects, others))
    assert same(ours, theirs)


def test_load_into_leaves_the_objects_alone_when_nothing_is_good(tmp_path: Path) -> None:
    saved(tmp_path)
    part = next((tmp_path / "data").rglob("*.part"))
    part.write_bytes(part.read_bytes()[:-40] + bytes(40))
    model = network(1)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(NoGoodCheckpoint):
        everstep.load_into(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert same(before, model.state_dict())


def test_names_that_do_not_meet_are_reported_instead_of_raised(tmp_path: Path) -> None:
    objects = saved(tmp_path, model=network(), head=nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Identity(), nn.Linear(4, 3))
    fresh = model[3].weight.detach().clone()
    with pytest.raises(StateMismatch, match=r"model.3.weight is not in the checkpoint"):
        everstep.load_into(tmp_path, model=model)
    restored = everstep.load_into(tmp_path, model=model, other=nn.Linear(1, 1), strict=False)
    assert sorted(restored.missing) == ["model.3.bias", "model.3.weight", "other"]
    assert sorted(restored.unexpected) == ["model.2.bias", "model.2.weight"]
    assert torch.equal(model[0].weight, objects["model"][0].weight)
    assert torch.equal(model[3].weight, fresh)
    with pytest.raises(StateMismatch, match=r"has shape"):
        everstep.load_into(tmp_path, head=nn.Linear(2, 3), strict=False)


def test_a_model_of_another_type_takes_a_cast(tmp_path: Path) -> None:
    objects, model = saved(tmp_path), network(1, torch.bfloat16)
    with pytest.raises(StateMismatch, match=r"is float32 in the checkpoint, bfloat16 here"):
        everstep.load_into(tmp_path, model=model)
    with pytest.raises(StateMismatch, match=r"is float32 in the checkpoint, bfloat16 here"):
        everstep.load_into(tmp_path, model=model, cast={torch.float32: torch.float16})
    for cast in (True, torch.bfloat16, {torch.float32: torch.bfloat16}):
        model = network(1, torch.bfloat16)
        everstep.load_into(tmp_path, model=model, cast=cast)
        assert torch.equal(model[0].weight, objects["model"][0].weight.bfloat16())


def test_a_tensor_of_another_type_or_shape_is_not_said_to_be_missing_here(tmp_path: Path) -> None:
    saved(tmp_path, model=network(), head=nn.Linear(2, 2))
    for name, each in (("model", network(1, torch.bfloat16)), ("head", nn.Linear(2, 3))):
        with pytest.raises(StateMismatch) as raised:
            everstep.load_into(tmp_path, **{name: each})
        problems = raised.value.problems
        assert len({problem.split()[0] for problem in problems}) == len(problems)
        assert "nothing here has it" not in str(raised.value)
    wider = nn.Sequential(*network(1, torch.bfloat16), nn.Linear(2, 2))
    with pytest.raises(StateMismatch) as raised:
        everstep.load_into(tmp_path, model=wider)
    assert "model.3.weight is not in the checkpoint" in raised.value.problems


def test_a_model_that_ranks_have_sharded_is_whole_again(tmp_path: Path) -> None:
    ranks.run(2, save_sharded, tmp_path)
    whole = network()
    assert same(everstep.load(tmp_path, only="model")["model"], whole.state_dict())
    assert everstep.load(tmp_path)["rank"][1]["own"]["value"].tolist() == [1.0]
    other = network(1)
    everstep.load_into(tmp_path, model=other)
    assert same(other.state_dict(), whole.state_dict())
    assert ranks.run(2, load_sharded, tmp_path) == [True, True]


def save_sharded(rank: int, folder: Path) -> None:
    ranks.save(
        PosixStore(folder),
        ranks.key(1),
        {"model": sharded(network()), "own": PerRank({"value": torch.tensor([float(rank)])})},
    )


def sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def load_sharded(rank: int, folder: Path) -> bool:
    model = sharded(network(1))
    everstep.load_into(folder, model=model)
    full = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in model.state_dict().items()
    }
    return same(full, network().state_dict())


def test_reading_beside_a_live_run_in_its_environment_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_EPOCH", "3")
    monkeypatch.setenv("EVERSTEP_GENERATION", "7")
    with session(tmp_path) as ckpt:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        ckpt.restore(state=state(0))
        ckpt.save(10)
        ckpt.wait()
        until(lambda: everstep.list_checkpoints(tmp_path / "store")[0].verified, "the writer has read it back")
        before = entries(tmp_path)
        assert everstep.load(tmp_path / "store")["state"]["step"] == 0
        model = state(5)
        everstep.load_into(tmp_path / "store", state=model)
        assert model["step"] == 0
        assert entries(tmp_path) == before
        ckpt.save(20)
    assert [key.step for key in list_candidates(ckpt.store)] == [20, 10]
    assert {key.attempt for key in list_candidates(ckpt.store)} == {Attempt(3, 7)}


def test_a_load_in_the_process_of_a_run_leaves_its_random_generators(tmp_path: Path) -> None:
    """An evaluation would else have the run draw the same once more; a restore() brings them back, as it has to."""
    with session(tmp_path) as ckpt:
        ckpt.restore(model=network())
        ckpt.save(10)
        ckpt.wait()
        drawn = torch.rand(3)
        model, before = network(1), Rng().state_dict()
        everstep.load(tmp_path / "store")
        everstep.load_into(tmp_path / "store", model=model)
        assert Rng().state_dict() == before
    with session(tmp_path) as ckpt:
        ckpt.restore(model=model)
        assert torch.equal(torch.rand(3), drawn)


def entries(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if path.is_file() and "leases" not in path.parts}


def test_a_store_that_can_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, x=torch.ones(3))

    def refuse(*args: Any, **options: Any) -> Any:
        raise StoreError("Read-only file system", str(tmp_path))

    for name in (
        "put",
        "put_if_absent",
        "replace",
        "delete",
        "sweep",
    ):  # a test may run as root, who may write anywhere
        monkeypatch.setattr(PosixStore, name, refuse)
    assert everstep.load(tmp_path)["x"].tolist() == [1.0] * 3
    target = torch.zeros(3)
    everstep.load_into(tmp_path, x=target)
    assert target.tolist() == [1.0] * 3
    assert [each.step for each in everstep.list_checkpoints(tmp_path)] == [1]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="of torch 2.8")
@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "float32"])
def test_a_cast_that_torch_does_not_do_is_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    kind = getattr(torch, name)
    with session(tmp_path) as ckpt:
        ckpt.track(a=torch.ones(4), w=torch.arange(4 * kind.itemsize, dtype=torch.uint8).view(kind))
        ckpt.save(1)
    store = tmp_path / "store"
    here = torch.zeros(4) if kind is torch.float4_e2m1fn_x2 else torch.zeros(4, dtype=torch.float4_e2m1fn_x2)
    for where in (None, "meta"):
        with pytest.raises(CheckpointError, match=f"w is of {kind}, which torch does not convert to {here.dtype}"):
            everstep.load(store, only="w", cast=here.dtype, map_location=where)
    first = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(StateMismatch, match="in the checkpoint"):
        everstep.load_into(store, cast=True, a=first, w=here)
    assert not first.any()
