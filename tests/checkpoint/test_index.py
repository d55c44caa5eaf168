"""An index says which node holds what, covers its world and every tensor, or is none; a reader takes what it needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.catalog.manifests import parse_node, read_index, read_manifest
from everstep.checkpoint.errors import Damaged, Incomplete, MissingRanks, UnknownFormat, WriterConflict
from everstep.checkpoint.format.checksum import compute_checksum
from everstep.checkpoint.format.coverage import check_cover, join_boxes
from everstep.checkpoint.format.index import (
    CheckpointIndex,
    IndexMerger,
    decode_index,
    describe_node_manifest,
    encode_announcement,
    encode_index,
)
from everstep.checkpoint.format.manifest import (
    HEADER,
    CheckpointPart,
    Chunk,
    Manifest,
    Shard,
    StoredTensor,
    encode_manifest,
)
from everstep.checkpoint.format.merging import merge_node_manifests
from everstep.checkpoint.publish import commit
from everstep.checkpoint.store.base import Store
from tests.checkpoint.builders import Training, key

Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]  # offsets, sizes


def node(ranks: Sequence[int], boxes: Boxes, shape: tuple[int, ...], world: int = 4) -> Manifest:
    """Return what a node wrote that has these boxes of the tensor `w`."""
    shards = [
        Shard(offsets, sizes, (Chunk(0, HEADER, volume(sizes), "0" * 16),) if volume(sizes) else ())
        for offsets, sizes in boxes
    ]
    parts = tuple(CheckpointPart(key().part_name(rank), HEADER + 4096, "0" * 16) for rank in ranks)
    return Manifest(
        key(),
        world,
        1,
        "model",
        "xxh3_64",
        1.5,
        parts,
        {"w": StoredTensor("uint8", shape, tuple(shards))},
        {"step": 10},
    )


def volume(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def announced(number: int, manifest: Manifest) -> CheckpointIndex:
    return describe_node_manifest(manifest, encode_manifest(manifest), number)


def merged(*nodes: Manifest) -> CheckpointIndex:
    merger = IndexMerger(len(nodes))
    for number, manifest in reversed(list(enumerate(nodes))):  # in whatever order they come
        merger.add(number, announced(number, manifest))
    return merger.merged()


def signed(fields: dict[str, Any]) -> bytes:
    first = json.dumps(fields).encode() + b"\n"
    return first + f"xxh3_64 {compute_checksum('xxh3_64', first)}\n".encode()


LOWER = node((0, 1), [((0, 0), (2, 3)), ((2, 0), (2, 3))], (8, 3))
UPPER = node((2, 3), [((6, 0), (2, 3)), ((4, 0), (2, 3))], (8, 3))


def test_shards_of_a_node_that_lie_side_by_side_are_one_box() -> None:
    index = merged(LOWER, UPPER)
    assert index.tensors["w"].boxes == ((0, 0, 0, 4, 3), (1, 4, 0, 4, 3))
    assert [share.ranks for share in index.nodes] == [(0, 1), (2, 3)]
    assert index.bytes == 4 * (HEADER + 4096)
    assert decode_index(encode_index(index), "i") == index


def test_a_world_of_which_ranks_are_missing_has_no_index() -> None:
    with pytest.raises(MissingRanks, match="is of 4 ranks, and has no part of rank 2, 3"):
        merged(node((0, 1), [((0, 0), (8, 3))], (8, 3)))
    alone = announced(0, node((0, 1), [((0, 0), (8, 3))], (8, 3)))
    with pytest.raises(MissingRanks):
        encode_index(alone)
    with pytest.raises(Damaged, match=r"is not whole: .* has no part of rank 2, 3"):
        decode_index(encode_announcement(alone), "i")


def test_a_rank_of_two_nodes_or_of_none_is_refused() -> None:
    with pytest.raises(WriterConflict, match=r"00001\.part: two nodes name it"):
        merged(LOWER, replace(UPPER, parts=(LOWER.parts[1], *UPPER.parts)))
    with pytest.raises(WriterConflict, match=r"00003\.part: is the part of no rank of a checkpoint of 3 ranks"):
        merged(replace(LOWER, world=3), replace(UPPER, world=3))


def test_the_first_node_says_how_an_object_is_built_in_whatever_order_they_come() -> None:
    said: list[dict[str, object]] = [
        {"s.%kind": {"dict": [["is", "value"], ["aliases", [[[first], ["last"]]]]]}} for first in ("best", "next")
    ]
    nodes = [replace(each, values=values) for each, values in zip((LOWER, UPPER), said, strict=True)]
    assert merged(*nodes).values == merge_node_manifests(nodes).values == said[0]
    # Node 0 may not hold it.
    upper = [node((rank,), [((2 * rank, 0), (2, 3))], (8, 3)) for rank in (2, 3)]
    nodes = [
        replace(LOWER, values={}),
        *(replace(each, values=values) for each, values in zip(upper, said, strict=True)),
    ]
    assert merged(*nodes).values == merge_node_manifests(nodes).values == said[0]


def test_an_element_of_no_node_or_of_two_is_named() -> None:
    with pytest.raises(Incomplete, match=r"w\[6:8, 0:3\] was written by nobody"):
        merged(LOWER, node((2, 3), [((4, 0), (2, 3))], (8, 3)))
    with pytest.raises(WriterConflict, match=r"w: \[3:4, 0:3\] was written 2 times"):
        merged(LOWER, node((2, 3), [((3, 0), (5, 3))], (8, 3)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": "other"}, "its model"),
        ({"world": 5}, "its world"),
        ({"values": {"step": 10.0}}, "disagree about this value: 10.0, 10"),
        ({"tensors": {"w": StoredTensor("int8", (8, 3), ())}}, r"w: uint8 \(8, 3\) for one writer|w: int8"),
    ],
    ids=str,
)
def test_nodes_that_disagree_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(WriterConflict, match=why):
        merged(LOWER, replace(UPPER, **change))


def test_no_flipped_bit_and_no_cut_of_an_index_goes_unseen() -> None:
    data = encode_index(merged(LOWER, UPPER))
    for place in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(Damaged):
            decode_index(bytes(flipped), "i")
    for size in range(len(data)):
        with pytest.raises(Damaged):
            decode_index(data[:size], "i")


def fields() -> dict[str, Any]:
    return dict(json.loads(encode_index(merged(LOWER, UPPER)).partition(b"\n")[0]))


def test_another_format_is_no_damage() -> None:
    with pytest.raises(UnknownFormat, match="i has format 3"):
        decode_index(signed(fields() | {"format": 3}), "i")


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": []},
        {"nodes": [{"name": "data/../x-0.json", "size": 1, "sum": "0" * 16, "bytes": 1, "ranks": [0, 1, 2, 3]}]},
        {"world": 0},
        {"tensors": {"w": {"dtype": "uint8", "shape": [8, 3], "boxes": [[2, 0, 0, 8, 3]]}}},
        {"tensors": {"w": {"dtype": "uint8", "shape": [8, 3], "boxes": [[0, 0, 0, 9, 3]]}}},
        {"tensors": {"w": {"dtype": "uint8", "shape": [8, 3], "boxes": [[0, 0, 8, 3]]}}},
        {"tensors": {"w": {"dtype": "uint8", "shape": [8, 3], "boxes": [[0, -1, 0, 9, 3]]}}},
        {"tensors": {"w": {"dtype": "qint8", "shape": [8, 3], "boxes": [[0, 0, 0, 8, 3]]}}},
        {"values": None},
    ],
    ids=str,
)
def test_an_index_that_leads_astray_is_damaged_though_its_checksum_holds(wrong: dict[str, Any]) -> None:
    with pytest.raises(Damaged, match="checksum that holds"):
        decode_index(signed(fields() | wrong), "i")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tensors": {"w": StoredTensor("uint8", (8, 3), LOWER.tensors["w"].shards[:1])}},
        {"tensors": {}},
        {"tensors": {**LOWER.tensors, "other": StoredTensor("uint8", (0,), ())}},
        {"parts": LOWER.parts[:1]},
        {"model": "other"},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_a_node_manifest_that_is_not_what_its_index_says_is_damaged(wrong: dict[str, Any]) -> None:
    index = merged(LOWER, UPPER)
    data = encode_manifest(replace(LOWER, **wrong))
    with pytest.raises(Damaged, match="is not the node manifest that the index"):
        parse_node(index, 0, data)
    # Though its own checksum is the one that the index names.
    lies = replace(index.nodes[0], size=len(data), sum=compute_checksum("xxh3_64", data))
    with pytest.raises(Damaged):
        parse_node(replace(index, nodes=(lies, index.nodes[1])), 0, data)


@given(st.data())
def test_boxes_that_are_joined_hold_the_same_elements_equally_often(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(0, 5)] * data.draw(st.integers(0, 3))))
    boxes = data.draw(st.lists(st.tuples(*[edge(extent) for extent in shape]), max_size=6))
    flat = [(*(start for start, _ in box), *(size for _, size in box)) for box in boxes]

    def counts(some: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        found = dict.fromkeys(product(*map(range, shape)), 0)
        for box in some:
            for place in product(*(range(box[i], box[i] + box[len(shape) + i]) for i in range(len(shape)))):
                found[place] += 1
        return found

    joined = join_boxes(len(shape), flat)
    assert counts(joined) == counts(flat)
    assert len(joined) <= len(flat)
    try:
        check_cover("w", shape, joined)
        assert set(counts(flat).values()) <= {1}
    except Incomplete as error:
        missing = product(*(range(*each) for each in error.region))
        assert not any(counts(flat)[place] for place in missing)
    except WriterConflict:
        assert max(counts(flat).values()) > 1


def edge(extent: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(0, extent).flatmap(lambda start: st.tuples(st.just(start), st.integers(0, extent - start)))


# Reading a part of it


class Reads:
    """A store that says which objects were read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, name: str) -> bytes:
        self.names.append(name)
        return self._store.read(name)


def test_a_rank_reads_the_index_and_the_manifests_of_the_nodes_that_it_needs(store: Store) -> None:
    training = Training(world=4)
    training.save(store, key())
    seen: Any = Reads(store)
    index = read_index(seen, key())
    rows = training.rows
    nodes = index.nodes_of({"shared": [((2 * rows, 2 * rows + 1), (0, 64))]}) | index.nodes_of_ranks([3])
    assert nodes == {2, 3}
    assert index.nodes_of({"own": None}) == {0}
    manifest = read_manifest(seen, key(), nodes=nodes, index=index)
    assert seen.names == [key().manifest_name, index.nodes[2].name, index.nodes[3].name] or set(seen.names[1:]) == {
        index.nodes[2].name,
        index.nodes[3].name,
    }
    assert [shard.offsets[0] for shard in manifest.tensors["shared"].shards] == [2 * rows, 3 * rows]
    assert manifest.tensors["own"].shards == ()
    assert manifest.tensors["own"].shape == (1000,)
    assert set(manifest.values) == {"step", "rank.2.seed", "rank.3.seed"}
    assert [part.name for part in manifest.parts] == [key().part_name(2), key().part_name(3)]
    whole = read_manifest(store, key())
    assert manifest.tensors["shared"].shards[0].chunks[0].sum == whole.tensors["shared"].shards[2].chunks[0].sum


def test_values_of_one_rank_are_not_in_the_index(store: Store) -> None:
    """At thousands of ranks they would be most of it."""
    Training(world=4).save(store, key())
    assert set(read_index(store, key()).values) == {"step"}
    assert "rank.3.seed" in read_manifest(store, key()).values


def test_a_torn_node_manifest_of_an_earlier_try_is_written_anew(store: Store) -> None:
    """A power loss may leave half of a manifest under its name."""
    training = Training(world=1)
    data, manifest = training.part(key(), 0)
    (share,) = announced(0, manifest).nodes
    store.replace(share.name, encode_manifest(manifest)[:50])
    store.put(key().part_name(0), [data], len(data))
    commit.announce_node(store, 0, manifest)
    training.commit(store, key())
    assert read_manifest(store, key()).tensors == manifest.tensors
