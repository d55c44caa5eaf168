"""Plain values come back with their type and their bits, or are refused with their path."""

from __future__ import annotations

import datetime
import enum
import json
import math
import struct
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.format.values import UnsupportedValue, pack_value, unpack_value

scalars = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
names = st.text() | st.integers() | st.booleans() | st.tuples(st.integers())
plain = st.recursive(
    scalars | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(names, inner),
    max_leaves=12,
)


def carried(value: object, **options: bool) -> Any:
    """Through the text of a manifest and back."""
    return unpack_value(json.loads(json.dumps(pack_value(value, "v", **options), allow_nan=False)), "v", **options)


def same(one: object, other: object) -> bool:
    """Equal with equal types all the way down, and floats with equal bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict) and isinstance(other, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(plain)
def test_plain_values_come_back_with_their_types(value: object) -> None:
    assert same(carried(value), value)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1], ids=repr)
def test_floats_are_exact(value: float) -> None:
    assert struct.pack("d", carried(value)) == struct.pack("d", value)


ODD = [2**53, -(2**64), True, "\ud800", {"dict": 1}, OrderedDict(b=1, a=2), Counter("aab"), {1, 2}, frozenset("x")]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_values_that_json_cannot_hold_come_back(value: object) -> None:
    assert same(carried(value), value)


def test_an_int_may_have_any_size() -> None:
    assert carried(10**5000) == 10**5000


@pytest.mark.parametrize("dtype", ["f4", ">f8", "i8", "u1", "?", "c16", "M8[s]", "U3"])
def test_arrays_come_back_with_dtype_shape_and_bits(dtype: str) -> None:
    array = numpy.arange(6).astype(dtype).reshape(2, 3)
    back = carried(array)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    back[0, 0] = back[1, 1]  # it can be written to
    assert type(carried(array[1, 2])) is type(array[1, 2])
    assert carried(array[1, 2]) == array[1, 2]


@pytest.mark.parametrize(
    "value",
    [
        numpy.str_(""),
        numpy.bytes_(b""),
        numpy.str_("ab\0"),
        numpy.bytes_(b"ab\0"),
        numpy.array(["x"], dtype=">U1")[0],
        numpy.zeros((), numpy.dtype([]))[()],
        numpy.zeros((2, 0), "V0"),
        numpy.zeros(2, "V0"),
        numpy.zeros(3, numpy.dtype([])),
    ],
    ids=repr,
)
def test_values_of_numpy_without_bytes_or_with_zeros_at_their_end_come_back(value: Any) -> None:
    """One that could be saved and not be read cost the whole checkpoint."""
    found = carried(value)
    assert type(found) is type(value)
    assert found.shape == value.shape
    if isinstance(value, str | bytes):
        assert (len(found), found) == (len(value), value)
    else:
        assert found.dtype == value.dtype


def test_an_array_is_saved_in_row_major_order_whatever_its_own() -> None:
    array = numpy.asfortranarray(numpy.arange(6).reshape(2, 3))
    assert (carried(array) == array).all()
    assert carried(numpy.zeros((0, 3))).shape == (0, 3)


def test_the_state_of_a_generator_comes_back() -> None:
    state = numpy.random.default_rng(1).bit_generator.state
    assert carried(state) == state


@pytest.mark.parametrize("value", [object(), Path("x"), numpy.array([object()]), lambda: 0, type("Own", (dict,), {})()])
def test_anything_else_is_refused_with_its_path(value: object) -> None:
    with pytest.raises(UnsupportedValue, match=r"^optimizer\['groups'\]\[1\]: .* without pickle"):
        pack_value({"groups": [1, value]}, "optimizer")


class Scheduler:
    def state_dict(self) -> dict[str, int]:
        return {}


class Average(Scheduler):
    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (datetime.datetime(2020, 1, 1), "plain values that make it again"),
        (enum.Enum("Mode", "ON").ON, "plain values that make it again"),  # type: ignore[attr-defined]
        (int, "its name,"),
        (Scheduler(), r"an object of your own .* its state_dict\(\)"),
        (Average(), r"it under a name of its own, as restore\(…, name=…\)"),
        (numpy.random.default_rng(1), r"an object of your own .* its bit_generator\.state"),
        (numpy.random.RandomState(1), r"an object of your own .* its get_state\(\)"),
        (numpy.array([object()]), r"numpy\.array"),
    ],
)
def test_what_is_refused_is_told_with_what_can_be_saved_instead(value: object, instead: str) -> None:
    with pytest.raises(UnsupportedValue, match=f"without pickle; save {instead}"):
        pack_value({"it": value})


@pytest.mark.parametrize("value", [lambda: 0, threading.Lock(), iter(lambda: 0, 1)], ids=["lambda", "lock", "iterator"])
def test_what_cannot_be_pickled_is_told_by_its_name(value: object) -> None:
    with pytest.raises(UnsupportedValue, match=r"^extra\.0\['it'\]: .* cannot be pickled: "):
        pack_value({"it": value}, "extra.0", allow_pickle=True)


def test_pickle_is_allowed_at_both_ends_or_not_at_all() -> None:
    packed = pack_value(Path("x"), allow_pickle=True)
    assert unpack_value(packed, allow_pickle=True) == Path("x")
    with pytest.raises(UnsupportedValue, match="allow_pickle"):
        unpack_value(packed, "v")
    with pytest.raises(UnsupportedValue, match="allow_pickle"):
        unpack_value({"tuple": [packed]}, "v")


@pytest.mark.parametrize(
    "packed",
    [{}, {"a": 1, "b": 2}, {"unknown": 1}, {"int": "zz"}, {"float": "00"}, {"bytes": "?"}, {"tuple": 3}, {"dict": [1]},
     {"numpy.ndarray": {"dtype": "O", "shape": [1], "data": ""}},
     {"numpy.ndarray": {"dtype": "f4", "shape": [3], "data": ""}}],
    ids=str,
)  # fmt: skip
def test_what_nobody_packed_is_refused(packed: object) -> None:
    with pytest.raises(UnsupportedValue):
        unpack_value(packed, "v")


@pytest.mark.torch
def test_torch_s_names_of_things_come_back() -> None:
    torch = pytest.importorskip("torch")
    for value in (torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])):
        assert carried(value) == value
        assert type(carried(value)) is type(value)
