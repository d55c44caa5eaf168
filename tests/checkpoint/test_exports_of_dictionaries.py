"""A dictionary of tensors, as of averaged weights by their parameters' names, is exported as a module is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.exchange import exporting, importing  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch


class Average:
    """Keeps averaged weights by the names of the parameters, as libraries for it do."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights = weights

    def state_dict(self) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = dict(state)


def weights() -> dict[str, Any]:
    names = ["0.weight", "0.bias", "model", "ema", "a/b", "[0].x", "x[ab]*", ".", "%41"]
    return {name: torch.full((2,), float(number)) for number, name in enumerate(names)}


def save(folder: Path, **objects: Any) -> Path:
    with session(folder) as ckpt:
        ckpt.track(**objects)
        ckpt.save(1)
    return folder / "store"


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize("make", [dict, Average])
def test_names_with_dots_are_found_again(make: Any, tmp_path: Path) -> None:
    store = save(tmp_path, model=torch.nn.Linear(2, 2), ema=make(weights()))
    exporting.export_safetensors(store, tmp_path / "ema.safetensors", name="ema")
    assert_equal(load_file(tmp_path / "ema.safetensors"), weights())
    exporting.export_safetensors(store, tmp_path / "ema", name="ema", max_shard_bytes=1)
    found: dict[str, Any] = {}
    for path in (tmp_path / "ema").glob("*.safetensors"):
        found |= load_file(path)
    assert_equal(found, weights())
    exporting.export_safetensors(
        store, tmp_path / "renamed.safetensors", name="ema", rename=lambda name: name.removeprefix("0.")
    )
    assert {"weight", "bias"} <= load_file(tmp_path / "renamed.safetensors").keys()
    importing.import_safetensors(tmp_path / "ema.safetensors", tmp_path / "imported")
    assert_equal(everstep.load(tmp_path / "imported")["model"], weights())


def test_one_tensor_under_two_names_is_written_under_both(tmp_path: Path) -> None:
    shared = torch.rand(3, 2)
    store = save(tmp_path, ema={"embed.weight": shared, "head.weight": shared})
    exporting.export_safetensors(store, tmp_path / "ema.safetensors", name="ema")
    assert_equal(load_file(tmp_path / "ema.safetensors"), {"embed.weight": shared, "head.weight": shared})


def test_keys_that_are_no_text_are_named(tmp_path: Path) -> None:
    store = save(tmp_path, table={5: torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"table holds more than tensors by their names \(5\)"):
        exporting.export_safetensors(store, tmp_path / "table.safetensors", name="table")
