"""A saved value can be read back, however deep it is nested; one that no reader could follow is rejected by name."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import everstep
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.values import UnsupportedValue
from everstep.checkpoint.state.flat import flatten_objects
from everstep.checkpoint.state.nesting import DEEPEST
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint import ranks

pytestmark = pytest.mark.torch

WRAPS: dict[str, Any] = {
    "text": lambda inner: {"below": inner, "beside": 1},
    "number": lambda inner: {5: inner},
    "list": lambda inner: [0, inner],
    "tuple": lambda inner: (inner,),
}


class Extra(nn.Module):  # type: ignore[misc]
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def nested(kinds: list[str], leaf: Any) -> dict[str, Any]:
    made = leaf
    for kind in kinds:
        made = WRAPS[kind](made)
    return {"top": made}


def bottom(state: Any) -> Any:
    """Return the number of levels and the innermost value, without a call for each level."""
    depth = 0
    while isinstance(state, dict | list | tuple):
        inner = list(state.values()) if isinstance(state, dict) else list(state)
        state = next((each for each in inner if not isinstance(each, int)), inner[0])
        depth += 1
    return depth, state.tolist() if isinstance(state, torch.Tensor) else state


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    st.integers(1, DEEPEST + 3) | st.integers(DEEPEST, 1500),
    st.sampled_from(["mixed", *WRAPS]),
    st.sampled_from([torch.ones(2), "leaf"]),
    st.booleans(),
)
def test_whatever_is_told_saved_reads_back(depth: int, kind: str, leaf: Any, is_extra: bool) -> None:
    kinds = random.Random(depth).choices([*WRAPS], k=depth - 1) if kind == "mixed" else [kind] * (depth - 1)
    state = nested(kinds, leaf)
    with tempfile.TemporaryDirectory() as folder:
        store = PosixStore(Path(folder) / "store")
        objects: dict[str, object] = {"state": Extra(state) if is_extra else state}
        if depth > DEEPEST:
            with pytest.raises(UnsupportedValue, match=rf"top: is nested more than {DEEPEST} deep"):
                ranks.save(store, ranks.key(1), objects)
            return
        ranks.save(store, ranks.key(1), objects)
        loaded = everstep.load(store.url)["state"]
        assert bottom(loaded["_extra_state"] if is_extra else loaded) == bottom(state)
        other, empty = Extra({}), dict[str, Any]()
        ranks.restore(store, Path(folder) / "memory", {"state": other if is_extra else empty})
        assert bottom(other.state if is_extra else empty) == bottom(state)


def test_what_holds_itself_is_refused_by_its_name() -> None:
    around: dict[str, Any] = {}
    around["again"] = [around]
    endless: list[Any] = []
    endless.append(endless)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"history": endless}
    for objects, name in (
        ({"state": {"ring": around}}, "state.ring"),
        ({"state": {"a": 1, "ring": (endless,)}}, "state.ring"),
        ({"optimizer": optimizer}, "optimizer.state.#0.history"),
    ):
        with pytest.raises(CheckpointError, match="holds itself") as caught:
            flatten_objects(objects, rank=0)
        assert str(caught.value).startswith(f"{name}: ")


class Broken:
    def state_dict(self) -> Any:
        raise KeyError("gone")

    def load_state_dict(self, state: Any) -> None: ...


def test_an_object_whose_state_cannot_be_had_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"^loader: its state cannot be had: KeyError: 'gone'$"):
        flatten_objects({"loader": Broken()}, rank=0)


def test_a_key_that_no_encoding_has_is_saved(tmp_path: Path) -> None:
    state = {"\ud800": {"tensor": torch.ones(2), "text": "\udfff"}}
    ranks.save(PosixStore(tmp_path), ranks.key(1), {"state": state})
    (loaded,) = everstep.load(tmp_path)["state"].values()
    assert (loaded["tensor"].tolist(), loaded["text"]) == ([1, 1], "\udfff")
