"""A manifest is what was written, or it is damaged; merged ones name every element exactly once."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.errors import Damaged, Incomplete, MissingRanks, UnknownFormat, WriterConflict
from everstep.checkpoint.format.checksum import ALGORITHMS, compute_checksum, get_checksum_width
from everstep.checkpoint.format.manifest import (
    CHUNK,
    FORMAT,
    HEADER,
    Attempt,
    Chunk,
    Key,
    Manifest,
    Shard,
    StoredTensor,
    align_offset,
    chunk_lengths,
    decode_manifest,
    encode_manifest,
    part_header,
)  # fmt: skip
from everstep.checkpoint.format.merging import join_manifests, merge_node_manifests
from tests.checkpoint.builders import Training, key
from tests.checkpoint.builders import node_manifest as node

numbers = st.integers(0, 10**10 - 1)
keys = st.builds(Key, st.builds(Attempt, numbers, numbers), st.integers(0, 10**12 - 1))


@given(keys, keys)
def test_names_of_manifests_sort_as_checkpoints_do(one: Key, other: Key) -> None:
    assert (one < other) == (one.manifest_name < other.manifest_name)


@given(keys)
def test_a_key_is_found_again_in_its_names(one: Key) -> None:
    assert Key.of_manifest(one.manifest_name) == one
    assert Key.of_data(one.part_name(3)) == Key.of_data(one.node_name(0)) == one


@pytest.mark.parametrize(
    "name", ["manifests/1.2-3.json", "latest", "manifests/" + "٣" * 10 + ".0000000001-000000000001.json"]
)
def test_other_names_are_no_keys(name: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        Key.of_manifest(name)


def test_a_number_that_does_not_fit_its_name_is_refused() -> None:
    with pytest.raises(ValueError, match="ten digits"):
        Attempt(10**10, 0)
    with pytest.raises(ValueError, match="twelve digits"):
        key(step=10**12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_checksum_is_the_same_for_every_kind_of_buffer(algorithm: str) -> None:
    data = bytes(range(256)) * 1025
    expected = compute_checksum(algorithm, data)
    assert len(expected) == get_checksum_width(algorithm)
    assert (
        compute_checksum(algorithm, bytearray(data))
        == compute_checksum(algorithm, memoryview(bytearray(data)))
        == expected
    )


def test_checksums_are_those_of_the_published_algorithms() -> None:
    assert compute_checksum("crc32c", b"123456789") == "e3069283"
    assert compute_checksum("xxh3_64", b"") == "2d06800538d394c2"


def small(checksum: str = "xxh3_64") -> Manifest:
    return Training(world=1, rows=1, checksum=checksum).part(key(), 0)[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_encoded_is_decoded(algorithm: str) -> None:
    scalar = StoredTensor("float32", (), (Shard((), (), (Chunk(0, HEADER, 4, "0" * get_checksum_width(algorithm)),)),))
    tensors = {"empty": StoredTensor("bfloat16", (0, 3), ()), "scalar": scalar}
    manifest = replace(small(algorithm), values={"lr": 0.1, "x": {"tuple": []}}, tensors=tensors)
    assert decode_manifest(encode_manifest(manifest), "m") == manifest


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_flipped_bit_of_a_manifest_goes_unseen(algorithm: str) -> None:
    data = encode_manifest(small(checksum=algorithm))
    for place in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(Damaged):
            decode_manifest(bytes(flipped), "m")


def test_no_cut_of_a_manifest_goes_unseen() -> None:
    data = encode_manifest(small())
    for size in range(len(data)):
        with pytest.raises(Damaged):
            decode_manifest(data[:size], "m")
    with pytest.raises(Damaged):
        decode_manifest(data + b"\n", "m")


def test_another_format_is_named_in_the_message() -> None:
    fields = json.loads(encode_manifest(small()).partition(b"\n")[0]) | {"format": 77}
    with pytest.raises(UnknownFormat, match=r"m has format 77.*use the version of everstep that wrote it"):
        decode_manifest(signed(fields), "m")
    # A later one may have other checksums too.
    with pytest.raises(UnknownFormat, match="has format 77"):
        decode_manifest(json.dumps(fields).encode() + b"\nblake9 0123\n", "m")
    with pytest.raises(Damaged):
        decode_manifest(json.dumps({**fields, "format": FORMAT}).encode() + b"\nblake9 0123\n", "m")


def signed(fields: dict[str, Any]) -> bytes:
    first = json.dumps(fields).encode() + b"\n"
    return first + f"xxh3_64 {compute_checksum('xxh3_64', first)}\n".encode()


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": [{"name": "data/../../etc/passwd", "size": 8192, "header": "0" * 16}]},
        {"parts": [{"name": key(11).part_name(0), "size": 8192, "header": "0" * 16}]},
        {"parts": []},
        {"world": 0},
        {"world": True},
        {"step": -1},
        {"created": "1"},
        {"tensors": []},
        {"checksum": "md5"},
    ],
    ids=str,
)
def test_a_manifest_that_leads_astray_is_damaged_though_its_checksum_holds(wrong: dict[str, Any]) -> None:
    fields = json.loads(encode_manifest(small()).partition(b"\n")[0])
    with pytest.raises(Damaged, match="checksum that holds"):
        decode_manifest(signed(fields | wrong), "m")


@pytest.mark.parametrize(
    "chunk",
    [Chunk(1, 4096, 3, "0" * 16), Chunk(0, 4095, 3, "0" * 16), Chunk(0, 4097, 3, "0" * 16), Chunk(0, 4096, 3, "A" * 16),
     Chunk(0, 4096, 4, "0" * 16)],
)  # fmt: skip
def test_a_chunk_outside_of_its_part_is_not_written(chunk: Chunk) -> None:
    manifest = small()
    manifest = replace(manifest, parts=(replace(manifest.parts[0], size=HEADER + 3),))
    tensors = {"w": StoredTensor("uint8", (3,), (Shard((0,), (3,), (chunk,)),))}
    with pytest.raises(ValueError, match="chunk"):
        encode_manifest(replace(manifest, tensors=tensors))


def test_a_dtype_that_the_format_does_not_know_is_not_written() -> None:
    manifest = small()
    with pytest.raises(ValueError, match="qint8"):
        encode_manifest(replace(manifest, tensors={"w": StoredTensor("qint8", (0,), (Shard((0,), (0,), ()),))}))


def test_a_part_begins_with_one_page_that_says_whose_it_is() -> None:
    header = part_header(key(7), 3)
    assert len(header) == HEADER
    fields = json.loads(header.removeprefix(b"EVERSTEP").rstrip(b"\0"))
    assert (fields["step"], fields["rank"], fields["format"]) == (7, 3, FORMAT)


def test_shards_begin_at_multiples_of_64() -> None:
    assert [align_offset(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_chunks_are_whole_but_for_the_last() -> None:
    assert chunk_lengths(0) == []
    assert chunk_lengths(CHUNK + 1) == [CHUNK, 1]


# Merging


def test_merged_parts_are_told_apart() -> None:
    merged = merge_node_manifests([node(0, [((0, 0), (2, 3))], (4, 3)), node(1, [((2, 0), (2, 3))], (4, 3))])
    assert [part.name for part in merged.parts] == [key().part_name(0), key().part_name(1)]
    assert [shard.chunks[0].part for shard in merged.tensors["w"].shards] == [0, 1]
    assert merged.nodes == 2
    assert decode_manifest(encode_manifest(merged), "m") == merged


def test_a_world_of_which_a_rank_is_missing_is_no_checkpoint() -> None:
    one = node(0, [((0, 0), (4, 3))], (4, 3))
    with pytest.raises(MissingRanks, match="is of 2 ranks, and has no part of rank 1"):
        merge_node_manifests([one])
    with pytest.raises(MissingRanks, match="no part of rank 0"):
        merge_node_manifests([node(1, [((0, 0), (4, 3))], (4, 3))])
    with pytest.raises(WriterConflict, match=r"00001\.part: is the part of no rank of a checkpoint of 1 ranks"):
        merge_node_manifests([replace(each, world=1) for each in (one, node(1, [], (4, 3)))])


def test_a_missing_element_is_named() -> None:
    with pytest.raises(Incomplete, match=r"w\[2:3, 0:3\] was written by nobody"):
        merge_node_manifests([node(0, [((0, 0), (2, 3))], (4, 3)), node(1, [((3, 0), (1, 3))], (4, 3))])


def test_an_element_of_two_shards_is_named() -> None:
    with pytest.raises(WriterConflict, match=r"w: \[1:2, 1:3\] was written 2 times"):
        merge_node_manifests(
            [
                node(0, [((0, 0), (2, 3))], (4, 3)),
                node(1, [((1, 1), (3, 2)), ((2, 0), (2, 1))], (4, 3)),
            ]
        )


def test_a_node_may_have_written_none_of_a_tensor_s_elements() -> None:
    merge_node_manifests([node(0, [((0, 0), (4, 3))], (4, 3)), node(1, [], (4, 3))])
    merge_node_manifests([node(0, [], (0, 3)), node(1, [((0, 0), (0, 3))], (0, 3))])
    merge_node_manifests([node(0, [((), ())], ()), node(1, [], ())])


def test_nodes_that_disagree_about_a_tensor_are_refused() -> None:
    with pytest.raises(WriterConflict, match="w: uint8"):
        merge_node_manifests([node(0, [((0,), (3,))], (3,)), node(1, [], (4,))])


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"world": 3}, {"key": key(11)}, {"checksum": "crc32c"}], ids=str
)
def test_nodes_that_saved_something_else_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WriterConflict, match=next(iter(change))):
        join_manifests([node(0, [], (0,)), replace(node(1, [], (0,)), **change)])


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), ({"tuple": [1]}, [1]), (0.0, -0.0)])
def test_plain_values_that_disagree_are_refused(one: object, other: object) -> None:
    nodes = [
        replace(node(0, [], (0,)), values={"lr": one}),
        replace(node(1, [], (0,)), values={"lr": other}),
    ]
    with pytest.raises(WriterConflict, match="disagree about this value"):
        merge_node_manifests(nodes)
    assert merge_node_manifests([nodes[0], replace(nodes[1], values={"lr": one, "rank.1.x": 2})]).values == {
        "lr": one,
        "rank.1.x": 2,
    }


def test_a_part_of_two_nodes_is_refused() -> None:
    with pytest.raises(WriterConflict, match=r"00000\.part"):
        merge_node_manifests([node(0, [((0,), (3,))], (3,)), node(0, [], (3,))])


@given(st.data())
def test_merge_finds_every_element_that_is_not_written_exactly_once(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(0, 4)] * data.draw(st.integers(0, 3))))
    boxes = data.draw(st.lists(st.tuples(*[box(extent) for extent in shape]), max_size=4))
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for each in boxes:
        for place in product(*(range(start, start + size) for start, size in each)):
            counts[place] += 1
    shards = [(tuple(start for start, _ in each), tuple(size for _, size in each)) for each in boxes]
    try:
        merge_node_manifests([node(0, shards, shape), node(1, [], shape)])
        assert set(counts.values()) <= {1}
    except Incomplete as error:
        missing = product(*(range(*edge) for edge in error.region))
        assert not any(counts[place] for place in missing)
    except WriterConflict:
        assert max(counts.values()) > 1


def box(extent: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(0, extent).flatmap(lambda start: st.tuples(st.just(start), st.integers(0, extent - start)))
