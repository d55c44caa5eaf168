"""A dictionary of tensors by their parameters' names, as of averaged weights, is imported, and restored as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.exchange import exporting, importing  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from tests.checkpoint.listing import Listing  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402
from tests.checkpoint.test_exports_of_dictionaries import Average, assert_equal  # noqa: E402

pytestmark = pytest.mark.torch


def weights(factor: float = 1.0) -> dict[str, Any]:
    names = ["1.weight", "1.bias", "0.weight", "a/b", "[0].x", "."]
    return {name: torch.full((2,), number * factor) for number, name in enumerate(names, 1)}


def import_by(way: str, folder: Path) -> Path:
    """Import the weights as the object `ema`."""
    store = folder / "imported"
    if way == "torch":
        torch.save({"model": nn.Linear(2, 2).state_dict(), "ema": weights()}, folder / "file.pt")
        importing.import_torch(folder / "file.pt", store)
        return store
    with session(folder) as ckpt:
        ckpt.track(ema=weights())
        ckpt.save(1)
    if way == "dcp":
        exporting.export_dcp(folder / "store", folder / "dcp")
        importing.import_dcp(folder / "dcp", store)
    else:
        exporting.export_safetensors(folder / "store", folder / "ema.safetensors", name="ema")
        importing.import_safetensors(folder / "ema.safetensors", store, name="ema")
    return store


@pytest.mark.parametrize("way", ["torch", "dcp", "safetensors"])
def test_it_is_restored_into_a_dictionary_and_into_an_object(way: str, tmp_path: Path) -> None:
    store = import_by(way, tmp_path)
    empty: dict[str, Any] = {}
    given = weights(0.0)
    tensors = list(given.values())
    average = Average(weights(0.0))
    for ema in (empty, given, average):
        result = everstep.load_into(store, ema=ema)
        assert not result.missing
        assert not result.unexpected
    assert_equal(empty, weights())
    assert_equal(given, weights())
    assert_equal(average.weights, weights())
    assert list(given) == list(average.weights) == list(weights())
    assert all(one is other for one, other in zip(given.values(), tensors, strict=True))
    restored = weights(0.0)
    with everstep.checkpointer(store, every_steps=10) as ckpt:
        assert ckpt.restore(ema=restored).kept == ()
    assert_equal(restored, weights())


def test_one_tensor_under_two_names_is_one_again(tmp_path: Path) -> None:
    shared = torch.rand(3)
    torch.save({"ema": {"embed.weight": shared, "head.weight": shared}}, tmp_path / "file.pt")
    importing.import_torch(tmp_path / "file.pt", tmp_path / "store")
    ema: dict[str, Any] = {}
    everstep.load_into(tmp_path / "store", ema=ema)
    assert_equal(ema, {"embed.weight": shared, "head.weight": shared})
    assert ema["embed.weight"] is ema["head.weight"]
    torch.save({"ema": {"embed.weight": shared, "head.weight": shared + 1}}, tmp_path / "other.pt")
    importing.import_torch(tmp_path / "other.pt", tmp_path / "others")
    with pytest.raises(StateMismatch, match="are one tensor here"):
        everstep.load_into(tmp_path / "others", ema=ema)


@pytest.mark.parametrize("seen", [[], [1.0, 2.0]])
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_module_that_says_a_list_is_imported_as_a_module(kind: str, seen: list[float], tmp_path: Path) -> None:
    model = nn.ModuleDict({"net": nn.Linear(2, 2), "metric": Listing()})
    model["metric"].seen = [torch.tensor([each]) for each in seen]
    file = tmp_path / kind
    if kind == "torch":
        torch.save({"model": model.state_dict()}, file)
        importing.import_torch(file, tmp_path / "store")
    else:
        with session(tmp_path / "first") as ckpt:
            ckpt.track(model=model)
            ckpt.save(1)
        exporting.export_dcp(tmp_path / "first" / "store", file)
        importing.import_dcp(file, tmp_path / "store")
    fresh = nn.ModuleDict({"net": nn.Linear(2, 2), "metric": Listing()})
    everstep.load_into(tmp_path / "store", model=fresh)
    assert torch.equal(fresh["net"].weight, model["net"].weight)
    assert [each.tolist() for each in fresh["metric"].seen] == [[each] for each in seen]


def test_what_was_saved_as_a_module_is_restored_as_its_state_dictionary(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with session(tmp_path) as ckpt:
        ckpt.track(model=model)
        ckpt.save(1)
    state: dict[str, Any] = {}
    everstep.load_into(tmp_path / "store", model=state)
    assert_equal(state, model.state_dict())
    average = Average({})
    everstep.load_into(tmp_path / "store", model=average)
    assert_equal(average.weights, model.state_dict())


def test_a_dictionary_that_nests_a_module_s_names_is_filled_as_it_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with session(tmp_path) as ckpt:
        ckpt.track(model=model)
        ckpt.save(1)
    weight = torch.zeros(3, 2)
    nested: dict[str, Any] = {"0": {"weight": weight}, "more": 1}
    assert everstep.load_into(tmp_path / "store", model=nested).kept == ("model.more",)
    assert nested["0"]["weight"] is weight
    assert torch.equal(weight, model[0].weight)
    assert nested.keys() == {"0", "1", "more"}
    assert_equal(nested["1"], model[1].state_dict())


def test_a_dictionary_is_renamed_to_a_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    average = {name: each + 1 for name, each in model.state_dict().items()}
    with session(tmp_path) as ckpt:
        ckpt.track(ema=average, model=model)
        ckpt.save(1)
    fresh = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    result = everstep.load_into(tmp_path / "store", model=fresh, rename={"ema.": "model.", "model.": None})
    assert not result.missing
    assert not result.unexpected
    assert_equal(fresh.state_dict(), average)


def test_a_state_within_another_is_renamed_to_a_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    torch.save({"app": {"model": model.state_dict(), "epoch": 3}}, tmp_path / "file.pt")
    importing.import_torch(tmp_path / "file.pt", tmp_path / "store")
    fresh = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with session(tmp_path) as ckpt:
        ckpt.restore(model=fresh, rename={"app.model.": "model.", "app.": None})
    assert_equal(fresh.state_dict(), model.state_dict())


def test_an_optimizer_is_not_restored_into_what_is_none(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with session(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=torch.optim.Adam(model.parameters()))
        ckpt.save(1)
    others: list[Any] = [{}, {"state": {}, "param_groups": []}, Average({})]
    for other in others:
        with pytest.raises(StateMismatch, match="optimizer is an optimizer in the checkpoint"):
            everstep.load_into(tmp_path / "store", optimizer=other)


def test_an_object_cannot_be_imported_under_the_name_of_ranks(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="'rank' cannot be imported"):
        importing.import_torch(tmp_path / "file.pt", tmp_path / "store", name="rank")
    save_file({"a": torch.ones(1)}, tmp_path / "file.safetensors")
    with pytest.raises(CheckpointError, match="'rank' cannot be imported"):
        importing.import_safetensors(tmp_path / "file.safetensors", tmp_path / "store", name="rank")
    assert not (tmp_path / "store").exists()
