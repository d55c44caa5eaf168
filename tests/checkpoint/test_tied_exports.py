"""Tied weights are one tensor to other libraries too: files of theirs hold it once, and name its other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, load_model, save_model  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.exchange import exporting, importing  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.test_tied_weights import by_restore, network, untied  # noqa: E402

pytestmark = pytest.mark.torch

SIZE = 4096
ONE_COPY = SIZE * 3 * 4  # bytes of the weight that embedding and head share
HEADER = 1024  # bytes at most that a format needs for the names of two tensors


def saved(folder: Path, model: Any) -> Path:
    ranks.save(PosixStore(folder), ranks.key(1), {"model": model})
    return folder


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata())


def test_an_export_holds_a_tied_tensor_once_and_safetensors_loads_it(tmp_path: Path) -> None:
    model = network(1, size=SIZE)
    exporting.export_safetensors(saved(tmp_path / "store", model), tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size <= ONE_COPY + HEADER
    assert metadata_of(tmp_path / "x.safetensors") == {"format": "pt", "head.weight": "embed.weight"}
    other = network(2, size=SIZE)
    assert load_model(other, tmp_path / "x.safetensors") == (set(), [])
    assert ranks.same(other.state_dict(), model.state_dict())


def test_a_folder_holds_a_tied_tensor_once_and_names_its_file(tmp_path: Path) -> None:
    model = network(1, size=SIZE)
    model.last = torch.nn.Linear(2, SIZE)
    exporting.export_safetensors(saved(tmp_path / "store", model), tmp_path / "out", max_shard_bytes=ONE_COPY)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 2
    assert sum(each.stat().st_size for each in files) <= ONE_COPY + 3 * SIZE * 4 + 2 * HEADER
    importing.import_safetensors(tmp_path / "out", tmp_path / "again")
    assert ranks.same(everstep.load(tmp_path / "again")["model"], model.state_dict())


def test_an_alias_takes_the_place_of_a_name_that_is_left_out(tmp_path: Path) -> None:
    store = saved(tmp_path / "store", network(1))
    exporting.export_safetensors(store, tmp_path / "x.safetensors", rename={"embed.": None, "head.": "out."})
    assert load_file(tmp_path / "x.safetensors").keys() == {"out.weight"}
    assert metadata_of(tmp_path / "x.safetensors") == {"format": "pt"}
    exporting.export_safetensors(store, tmp_path / "y.safetensors", rename={"embed.": "in.", "head.": "out."})
    assert metadata_of(tmp_path / "y.safetensors") == {"format": "pt", "out.weight": "in.weight"}


def test_weights_that_are_two_are_written_twice_although_they_are_equal(tmp_path: Path) -> None:
    """A loader would find one of them missing, and make it anew."""
    model = network(1, is_tied=False)
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
    exporting.export_safetensors(saved(tmp_path / "store", model), tmp_path / "x.safetensors")
    assert ranks.same(load_file(tmp_path / "x.safetensors"), model.state_dict())


def test_a_file_of_torch_holds_a_tied_tensor_once(tmp_path: Path) -> None:
    model = network(1, size=SIZE)
    state = everstep.load(saved(tmp_path / "store", model))["model"]
    assert list(state) == list(model.state_dict())
    assert state["head.weight"] is state["embed.weight"]
    torch.save(state, tmp_path / "x.pt")
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    assert (tmp_path / "x.pt").stat().st_size <= (tmp_path / "theirs.pt").stat().st_size + HEADER
    alone = everstep.load(tmp_path / "store", only="model.head.*")["model"]
    assert ranks.same(alone, {"head.weight": model.head.weight})


@pytest.mark.parametrize("way", ["safetensors", "torch"])
def test_what_another_library_has_saved_of_a_tied_model_stays_tied(way: str, tmp_path: Path) -> None:
    model = network(1, size=SIZE)
    if way == "torch":
        torch.save(model.state_dict(), tmp_path / "x.pt")
        importing.import_torch(tmp_path / "x.pt", tmp_path / "store", rename={"model.": "net."})
    else:
        save_model(model, str(tmp_path / "x.safetensors"))
        importing.import_safetensors(tmp_path / "x.safetensors", tmp_path / "store", rename={"model.": "net."})
    state = everstep.load(tmp_path / "store")["net"]
    assert state["head.weight"] is state["embed.weight"]
    network(2, size=SIZE).load_state_dict(state)
    exporting.export_safetensors(tmp_path / "store", tmp_path / "y.safetensors", name="net")
    assert (tmp_path / "y.safetensors").stat().st_size <= ONE_COPY + HEADER


def test_a_key_of_metadata_that_names_no_tensor_is_no_alias(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"pt": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "pt", "made by": "hand"})
    importing.import_safetensors(tmp_path / "x.safetensors", tmp_path / "store")
    assert everstep.load(tmp_path / "store")["model"].keys() == {"pt"}


def test_an_export_of_an_import_is_restored_into_a_tied_model(tmp_path: Path) -> None:
    model = network(1)
    exporting.export_safetensors(saved(tmp_path / "first", model), tmp_path / "x.safetensors")
    importing.import_safetensors(tmp_path / "x.safetensors", tmp_path / "store")
    other = network(2)
    assert by_restore(tmp_path, other).missing == ()
    assert ranks.same(other.state_dict(), model.state_dict())


def test_a_checkpoint_that_names_no_ties_is_exported_under_each_name(tmp_path: Path) -> None:
    """As of a version of everstep that did not save them."""
    saved(tmp_path / "store", untied("embed.weight", torch.ones(4, 3)))
    exporting.export_safetensors(tmp_path / "store", tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors").keys() == {"embed.weight"}


@pytest.mark.parametrize("rows", [4, 1])
def test_weights_that_are_tied_and_sharded_are_exported_once(rows: int, tmp_path: Path) -> None:
    """One row is on rank 0 alone, and rank 1 has no element of it by which to tell."""
    ranks.run(2, save_sharded, tmp_path / "store", rows)
    exporting.export_safetensors(tmp_path / "store", tmp_path / "x.safetensors")
    assert ranks.same(load_file(tmp_path / "x.safetensors"), {"embed.weight": network(1, size=rows).embed.weight})
    state = everstep.load(tmp_path / "store")["model"]
    assert state["head.weight"] is state["embed.weight"]


def save_sharded(rank: int, folder: Path, rows: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = network(1, size=rows)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    saved(folder, model)
