"""Two checkpoints are compared by what they hold, not by how it is cut."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import read_manifest
from everstep.checkpoint.catalog.difference import iterate_differences
from everstep.checkpoint.format.checksum import compute_checksum
from everstep.checkpoint.format.manifest import (
    HEADER,
    CheckpointPart,
    Chunk,
    Key,
    Manifest,
    Shard,
    StoredTensor,
    part_header,
)
from everstep.checkpoint.store.base import Store, open_store
from tests.checkpoint.builders import Training, key

FLOATS = [1.0, 2.0, 3.0, float("nan")]


@pytest.fixture
def place(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def saved(store: Store, key: Key, dtype: str, data: bytes, *, cuts: int = 1) -> Manifest:
    """A tensor `w` of one dimension in `cuts` shards."""
    width = len(data) // 4
    body = bytearray(part_header(key, 0))
    shards = []
    for cut in range(cuts):
        piece = data[cut * len(data) // cuts : (cut + 1) * len(data) // cuts]
        body.extend(b"\0" * (-len(body) % 64))
        chunk = Chunk(0, len(body), len(piece), compute_checksum("xxh3_64", piece))
        shards.append(Shard((cut * 4 // cuts,), (len(piece) // width,), (chunk,)))
        body.extend(piece)
    part = CheckpointPart(key.part_name(0), len(body), compute_checksum("xxh3_64", bytes(body[:HEADER])))
    store.put(part.name, [bytes(body)], len(body))
    return Manifest(key, 1, 1, "m", "xxh3_64", 1.5, (part,), {"w": StoredTensor(dtype, (4,), tuple(shards))}, {})


def compared(store: Store, first: Manifest, second: Manifest) -> list[str]:
    return [f"{each.name}: {each.what}" for each in iterate_differences((store, first), (store, second))]


def test_the_same_state_cut_in_another_way_is_the_same(place: Store) -> None:
    data = struct.pack("<4f", *FLOATS)
    first, second = saved(place, key(1), "float32", data), saved(place, key(2), "float32", data, cuts=2)
    assert compared(place, first, second) == []


@pytest.mark.parametrize(
    ("dtype", "first", "second", "apart"),
    [
        ("float32", struct.pack("<4f", *FLOATS), struct.pack("<4f", 1.0, 2.5, 1.0, float("nan")), ", up to 2 apart"),
        ("int16", struct.pack("<4h", 1, 2, 3, 4), struct.pack("<4h", 1, -2, 3, 5), ", up to 4 apart"),
        ("bfloat16", bytes.fromhex("803f00400000803f"), bytes.fromhex("004000400000003f"), ", up to 1 apart"),
        ("float8_e4m3fn", b"abcd", b"xbcx", ""),
    ],
)
def test_elements_that_differ_are_counted(place: Store, dtype: str, first: bytes, second: bytes, apart: str) -> None:
    ours, theirs = saved(place, key(1), dtype, first), saved(place, key(2), dtype, second, cuts=2)
    assert compared(place, ours, theirs) == [f"w: 2 of 4 elements{apart}"]


def test_names_types_and_shapes_come_before_bytes(place: Store) -> None:
    first = saved(place, key(1), "uint8", b"abcd")
    other = replace(first, tensors={"v": first.tensors["w"]}, values={"step": 1})
    assert compared(place, first, other) == [
        "v: only in the second",
        "w: only in the first",
        "step: only in the second",
    ]
    signed = replace(first, tensors={"w": replace(first.tensors["w"], dtype="int8")})
    assert compared(place, first, signed) == ["w: uint8 [4] and int8 [4]"]


def test_values_are_compared_with_their_types(place: Store) -> None:
    first = saved(place, key(1), "uint8", b"abcd")
    ours, theirs = replace(first, values={"a": 1, "b": 2}), replace(first, values={"a": True, "b": 2})
    assert compared(place, ours, theirs) == ["a: 1 and true"]


def test_two_steps_of_a_run_differ_where_they_differ(place: Store) -> None:
    Training().save(place, key(1))
    Training().save(place, key(2))
    found = compared(place, read_manifest(place, key(1)), read_manifest(place, key(2)))
    assert [each.split(":")[0] for each in found] == ["own", "shared", "rank.0.seed", "rank.1.seed", "step"]
