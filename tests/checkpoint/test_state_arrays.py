"""Arrays and bytes of any size cost what their bytes cost, and come back as exactly what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.format.manifest import encode_manifest  # noqa: E402
from everstep.checkpoint.format.values import LARGEST_VALUE, UnsupportedValue  # noqa: E402
from everstep.checkpoint.state.flat import flatten_objects  # noqa: E402
from everstep.checkpoint.state.kinds import PerRank  # noqa: E402
from everstep.checkpoint.state.rng import Rng  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session, steps_in  # noqa: E402

pytestmark = pytest.mark.torch

RECORD = np.dtype([("id", "<i8"), ("name", "U20"), ("at", [("x", ">f4"), ("y", "<f4", (2,))])])


def some(dtype: Any, *shape: int) -> Any:
    data = np.random.default_rng(0).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(data, dtype).reshape(shape).copy()


ARRAYS: dict[str, Any] = {
    **{name: some(name, 30, 40) for name in ("f2", "f4", "f8", "i1", "u2", "i8", "u8", "c8", "c16", ">f4", ">i2")},
    "bool": np.arange(2000).reshape(20, 100) % 3 == 0,
    "unicode": np.array([["äö", "b"] * 50] * 9),
    "bytes of a width": np.array([b"abc", b"de"] * 300),
    "dates": np.arange("2020-01", "2025-01", dtype="M8[D]"),
    "records": np.zeros(60, RECORD),
    "a zero-dimensional one": np.array("x" * 2000),
    "Fortran's order": np.asfortranarray(some("f4", 30, 40)),
    "every second": some("f8", 30, 80)[:, ::2],
    "backwards": some("i4", 600)[::-1],
    "read-only": np.frombuffer(bytes(range(256)) * 8, "u1"),
    "void": np.frombuffer(bytes(range(256)) * 8, "V16"),
    "empty": np.zeros((0, 5), ">f8"),
    "small": some("f4", 3, 4),
    "small records": np.zeros(2, RECORD),
    "small, Fortran's": np.asfortranarray(some("f2", 3, 4)),
}


@pytest.mark.parametrize("name", list(ARRAYS))
def test_an_array_comes_back_exactly(tmp_path: Path, name: str) -> None:
    array = ARRAYS[name]
    store = PosixStore(tmp_path / "store")
    state: dict[str, Any] = {"a": None, "deep": [{}]}
    manifest = ranks.save(store, ranks.key(10), {"state": {"a": array, "deep": [{3: array}]}})
    assert len(encode_manifest(manifest)) < 6000, "its bytes are not in the manifest"
    ranks.restore(store, tmp_path / "memory", {"state": state})
    for loaded in (state["a"], state["deep"][0][3]):
        assert type(loaded) is np.ndarray
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
        assert loaded.tobytes() == array.tobytes()
        assert loaded.flags.writeable
        if array.nbytes > 1024:
            assert loaded.flags.f_contiguous or not array.flags.f_contiguous
    assert everstep.load(str(tmp_path / "store"))["state"]["a"].tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("size", [0, 10, 5000])
def test_bytes_come_back_exactly(tmp_path: Path, kind: Any, size: int) -> None:
    data = kind(bytes(range(256)) * 20)[:size]
    state: dict[str, Any] = {}
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), {"state": {"data": data}})
    ranks.restore(tmp_path / "store", tmp_path / "memory", {"state": state})
    assert type(state["data"]) is kind
    assert state["data"] == data


def test_an_array_may_have_another_size_at_each_save(folder: Path) -> None:
    state: dict[str, Any] = {"losses": np.zeros(500), "old": np.ones(300)}
    with session(folder, every="1h", keep_last=10) as ckpt:
        ckpt.track(state=state)
        for step in range(1, 5):
            state["losses"] = np.arange(500.0 + step)
            state.pop("old", None)
            ckpt.save(step)
            ckpt.wait()
        assert ckpt.metrics()["failed"] == 0
    assert steps_in(folder) == [1, 2, 3, 4]
    state = {"losses": None}
    with session(folder) as ckpt:
        ckpt.restore(state=state)
    assert state["losses"].tobytes() == np.arange(504.0).tobytes()


def np_of(state: dict[str, Any]) -> dict[str, Any]:
    return {key: each.numpy() if isinstance(each, torch.Tensor) else each for key, each in state.items()}


AFTER_AN_ARRAY: dict[str, dict[str, Any]] = {
    "nothing": {},
    "None": {"x": None},
    "a number": {"x": 5},
    "an empty list": {"x": []},
    "a tensor": {"x": torch.ones(3)},
    "a dictionary": {"x": {"a": 1}},
    "an array in a dictionary": {"x": {"a": np.ones(300)}},
}


@pytest.mark.parametrize("kind", AFTER_AN_ARRAY)
def test_what_takes_the_place_of_an_array_is_saved_as_what_it_is(folder: Path, kind: str) -> None:
    after = AFTER_AN_ARRAY[kind]
    state: dict[str, Any] = {"x": np.arange(300.0)}
    with session(folder, every="1h") as ckpt:
        ckpt.track(state=state)
        ckpt.save(1)
        ckpt.wait()
        del state["x"]
        state.update(after, n=2)
        ckpt.save(2)
    loaded: dict[str, Any] = everstep.load(folder / "store")["state"]
    restored: dict[str, Any] = {}
    with session(folder) as ckpt:
        ckpt.restore(state=restored)
    for found in (loaded, restored):
        assert found.pop("n") == 2
        assert [type(each) for each in found.values()] == [type(each) for each in after.values()]
        np.testing.assert_equal(np_of(found), np_of(after))


def test_a_plain_value_that_is_too_large_for_a_manifest_is_refused_with_advice() -> None:
    history = [0.5] * (LARGEST_VALUE // 8 + 1)
    with pytest.raises(
        UnsupportedValue, match=r"state\.history: takes about 64 MiB .*: keep it as a NumPy array or a tensor"
    ):
        flatten_objects({"state": {"history": history}}, rank=0)


def test_generators_are_one_tensor_and_little_else() -> None:
    flat = flatten_objects({"rng": PerRank(Rng())}, rank=7)
    assert set(flat.tensors) == {"rank.7.rng.states"}
    assert len(repr(flat.values)) < 1000
