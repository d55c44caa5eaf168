"""A nested state is built again as it was: order and kinds of dictionaries, types of keys, and what an object is."""

from __future__ import annotations

import tempfile
from collections import Counter, OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.catalog.candidates import read_manifest  # noqa: E402
from everstep.checkpoint.format.descriptions import is_description  # noqa: E402
from everstep.checkpoint.format.values import UnsupportedValue  # noqa: E402
from everstep.checkpoint.state.flat import Flat, flatten_objects  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

NAMES = [
    "state",
    "options",
    "param_groups",
    "_extra_state",
    "kind",
    "%kind",
    "a.b",
    "a/b",
    "#1",
    "[0]",
    "(0)",
    "%",
    "5",
]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)
keys = (
    st.sampled_from(NAMES)
    | st.text(max_size=4)
    | st.integers(-9, 9)
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False)
    | st.tuples(st.integers(), st.sampled_from(NAMES))
)
tensors = st.lists(st.integers(-9, 9), max_size=3).map(torch.tensor)


def made_into(pairs: dict[Any, Any], kind: str) -> Any:
    found: Any = {"dict": {}, "ordered": OrderedDict(), "counter": Counter(), "default": defaultdict(list)}[kind]
    for key, value in pairs.items():
        found[key] = value
    return found


def containers(inner: Any) -> Any:
    pairs = st.dictionaries(keys, inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    kinds = st.sampled_from(["dict", "dict", "ordered", "counter", "default"])
    return st.builds(made_into, pairs, kinds) | st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)


nested = st.recursive(scalars | tensors, containers, max_leaves=10)
states = st.dictionaries(keys, nested, max_size=4)


def exactly(value: Any) -> Any:
    """Equal for values that are equal in all that a program may see of them."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.tolist())
    if isinstance(value, dict):
        made = getattr(value, "default_factory", None)
        return (type(value), made, [(exactly(key), exactly(each)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [exactly(each) for each in value])
    return (type(value), repr(value))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(states)
def test_whatever_is_nested_is_equal_when_it_is_loaded_and_when_it_is_restored(state: dict[Any, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = PosixStore(Path(folder) / "store")
        ranks.save(store, ranks.key(1), {"state": state})
        assert exactly(everstep.load(Path(folder) / "store")["state"]) == exactly(state)
        empty: dict[Any, Any] = {}
        ranks.restore(store, Path(folder) / "memory", {"state": empty})
        assert exactly(empty) == exactly(state)


def test_what_an_object_is_does_not_follow_from_names(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    looks = {"param_groups": {"x": torch.ones(1)}, "options": {"x": 1}, "state": {}}
    objects: dict[str, object] = {"model": model, "optimizer": optimizer, "looks": looks, "ema": {"a": looks}}
    ranks.save(PosixStore(tmp_path), ranks.key(1), objects)
    loaded = everstep.load(tmp_path)
    assert exactly(loaded["looks"]) == exactly(looks)
    assert exactly(loaded["ema"]) == exactly({"a": looks})
    assert sorted(loaded["model"]) == ["bias", "weight"]
    assert sorted(loaded["optimizer"]["param_groups"][0]["params"]) == ["bias", "weight"]
    assert everstep.load(tmp_path, only="ema.a.param_groups.*")["ema"] == {"a": {"param_groups": looks["param_groups"]}}
    assert sorted(everstep.load(tmp_path, only="model.weight")["model"]) == ["weight"]


def test_a_checkpoint_that_does_not_say_what_its_objects_are_is_read_by_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_before(*args: Any, **kwargs: Any) -> Flat:
        flat = flatten_objects(*args, **kwargs)
        return replace(flat, values={name: each for name, each in flat.values.items() if not is_description(name)})

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monkeypatch.setattr(ranks, "flatten_objects", as_before)
    store = PosixStore(tmp_path / "store")
    ranks.save(store, ranks.key(1), {"model": model, "optimizer": optimizer, "state": {"b": 1, "a": [2]}})
    assert not any(map(is_description, read_manifest(store, ranks.key(1)).values))
    loaded = everstep.load(tmp_path / "store")
    assert sorted(loaded["model"]) == ["bias", "weight"]
    assert sorted(loaded["optimizer"]["param_groups"][0]["params"]) == ["bias", "weight"]
    assert loaded["state"] == {"b": 1, "a": [2]}
    empty: dict[str, Any] = {}
    ranks.restore(store, tmp_path / "memory", {"state": empty, "model": model, "optimizer": optimizer})
    assert empty == loaded["state"]


class Key:
    """No plain value."""


def test_a_tensor_under_a_key_that_cannot_be_saved_is_refused_for_the_key() -> None:
    with pytest.raises(
        UnsupportedValue, match=r"state.x\[key .*Key object.*a tests\.checkpoint\.test_structure\.Key cannot be"
    ):
        flatten_objects({"state": {"x": {1: torch.ones(1), Key(): 2}}}, rank=0)
    with pytest.raises(UnsupportedValue, match=r"a tensor cannot be saved inside of what is saved as one value"):
        flatten_objects({"state": {"x": {torch.ones(1)}}}, rank=0)


def in_an_order(rank: int, folder: Path) -> list[str]:
    state = {"b": torch.ones(1), "a": 1} if rank else {"a": 1, "b": torch.ones(1)}
    ranks.save(PosixStore(folder), ranks.key(1), {"state": state})
    return list(everstep.load(folder)["state"])


def test_ranks_may_have_built_a_dictionary_in_another_order(tmp_path: Path) -> None:
    assert ranks.run(2, in_an_order, tmp_path) == [["a", "b"]] * 2


def kept_by_one(rank: int, folder: Path, keeper: int) -> list[Any]:
    # As names, or as one value each: of plain values in lists, of keys that are no text, of an array, of None itself.
    kept = {"epoch": 2, "history": {"e0": 1.5, "e1": 1.0}, "best": {"loss": 1.0}, "seen": [torch.ones(1)], "last": {}}
    kept |= {
        "file \udcff": {"a": 1},
        "losses": [1.5, 1.0],
        "by_epoch": {0: 1.5},
        "loss": 1.0,
        "curve": np.arange(3),
        "map": np.arange(999),
    }
    nothing = {"epoch": 2, "history": {}, "best": None, "seen": [], "last": {}}
    nothing |= {"file \udcff": {}, "losses": [], "by_epoch": {}, "loss": None, "curve": None, "map": None}
    ranks.save(PosixStore(folder / "store"), ranks.key(1), {"state": kept if rank == keeper else nothing})
    given: dict[str, Any] = {**nothing, "epoch": 0}
    ranks.restore(PosixStore(folder / "store"), folder / "memory", {"state": given})
    return [exactly(found) == exactly(kept) for found in (everstep.load(folder / "store")["state"], given)]


@pytest.mark.parametrize("keeper", [0, 1])
def test_what_one_rank_alone_keeps_in_a_container_that_is_empty_on_others_reads_back(
    keeper: int, tmp_path: Path
) -> None:
    assert ranks.run(2, kept_by_one, tmp_path, keeper) == [[True, True]] * 2
