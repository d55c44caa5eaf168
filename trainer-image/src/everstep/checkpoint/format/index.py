"""The index of a checkpoint, which is its commit: small, it says which node holds which boxes of which tensor.

What the boxes consist of, bytes and checksums, is in the node manifests that it names, and a reader takes those that it
needs. A node announces its share as an index of itself alone; the committer merges these. Pure: no store, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint.errors import Damaged, Incomplete, MissingRanks, WriterConflict
from everstep.checkpoint.format import lines
from everstep.checkpoint.format.checksum import ALGORITHMS, compute_checksum, get_checksum_width
from everstep.checkpoint.format.coverage import FlatBox, Region, check_cover, check_world, join_boxes, overlaps_region
from everstep.checkpoint.format.descriptions import is_description
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.format.manifest import Manifest, Shard, get_itemsize
from everstep.checkpoint.format.nested_names import check_states, join_values

RANK_VALUES = "rank."  # values of this prefix are one rank's own, and stay in its node's manifest


@dataclass(frozen=True, slots=True)
class NodeShare:
    """A node's share of a checkpoint: the `name`, `size` in bytes and `sum` of its node manifest, the `bytes` of all
    its parts together, and the `ranks` whose parts they are."""

    name: str
    size: int
    sum: str
    bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """`dtype` and `shape` as in a manifest; `boxes`, each (node, offsets …, sizes …), in order."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CheckpointIndex:
    """A checkpoint, or with one node and not all of its world what that node announces.

    `nodes` in their order; boxes name them by their place in it. `values` are packed and the same for all ranks.
    """

    key: Key
    world: int
    model: str
    checksum: str
    created: float
    nodes: tuple[NodeShare, ...]
    tensors: dict[str, IndexedTensor]
    values: dict[str, object]

    @property
    def bytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(node.bytes for node in self.nodes)

    def nodes_of(self, wanted: Mapping[str, Sequence[Region] | None]) -> set[int]:
        """Return the nodes that hold something of what is wanted.

        Args:
            wanted: For each tensor by name the regions, (start, stop) for each dimension; None for all of it.
        """
        found: set[int] = set()
        for name, regions in wanted.items():
            for node, *box in self.tensors[name].boxes:
                if node not in found and (
                    regions is None or any(overlaps_region(tuple(box), each) for each in regions)
                ):
                    found.add(node)
        return found

    def nodes_of_ranks(self, ranks: Iterable[int]) -> set[int]:
        """Return the nodes on which these ranks ran: what is a rank's own is there."""
        wanted = set(ranks)
        return {number for number, node in enumerate(self.nodes) if not wanted.isdisjoint(node.ranks)}


def describe_node_manifest(manifest: Manifest, data: bytes, node: int) -> CheckpointIndex:
    """Return what node number `node` announces: an index of its own manifest, which is `data` when encoded."""
    sum_ = compute_checksum(manifest.checksum, data)
    share = NodeShare(
        manifest.key.node_manifest_name(node, sum_),
        len(data),
        sum_,
        sum(part.size for part in manifest.parts),
        tuple(manifest.key.rank_of(part.name) for part in manifest.parts),
    )
    return CheckpointIndex(
        manifest.key,
        manifest.world,
        manifest.model,
        manifest.checksum,
        manifest.created,
        (share,),
        {
            name: IndexedTensor(
                tensor.dtype,
                tensor.shape,
                tuple((0, *box) for box in held_boxes(len(tensor.shape), tensor.shards)),
            )
            for name, tensor in manifest.tensors.items()
        },
        {name: value for name, value in manifest.values.items() if not name.startswith(RANK_VALUES)},
    )


def held_boxes(count: int, shards: Iterable[Shard]) -> list[FlatBox]:
    """Return the boxes, of `count` dimensions, that these shards make up."""
    return join_boxes(count, ((*shard.offsets, *shard.sizes) for shard in shards))


class IndexMerger:
    """Makes one index of what the nodes of a checkpoint announce, in any order. Only their boxes are kept."""

    def __init__(self, nodes: int) -> None:
        self._shares: list[NodeShare | None] = [None] * nodes
        self._first: CheckpointIndex | None = None
        self._created = 0.0
        self._tensors: dict[str, tuple[str, tuple[int, ...], list[tuple[int, ...]]]] = {}
        self._values: dict[str, object] = {}
        self._described: dict[str, int] = {}  # by which node, for each description

    def add(self, node: int, announced: CheckpointIndex) -> None:
        """Add what one node said. Raises WriterConflict when it disagrees with another one."""
        if self._first is None:
            self._first = announced
        _check_same(self._first, announced)
        (self._shares[node],) = announced.nodes
        self._created = max(self._created, announced.created)
        for name, tensor in announced.tensors.items():
            dtype, shape, boxes = self._tensors.setdefault(name, (tensor.dtype, tensor.shape, []))
            if (dtype, shape) != (tensor.dtype, tensor.shape):
                raise WriterConflict(name, f"{dtype} {shape} for one writer, {tensor.dtype} {tensor.shape} for another")
            boxes.extend((node, *box[1:]) for box in tensor.boxes)
        join_values(self._values, announced.values)
        # Rank 0 is the only one that saves some of what others hold too, as it is by now. Of what it does not hold, the
        # first one that does counts, in whatever order nodes come.
        for name in filter(is_description, announced.values):
            if node <= self._described.setdefault(name, node):
                self._described[name], self._values[name] = node, announced.values[name]

    def merged(self) -> CheckpointIndex:
        """Return the index of all nodes.

        Raises:
            MissingRanks: A rank of the world has no part.
            Incomplete: An element of a tensor is in no shard.
            WriterConflict: It is in two, two nodes wrote the part of one rank, or no state has all of their leaves.
        """
        assert self._first is not None
        check_states(self._tensors, self._values)
        index = CheckpointIndex(
            self._first.key,
            self._first.world,
            self._first.model,
            self._first.checksum,
            self._created,
            tuple(share for share in self._shares if share is not None),
            {
                name: IndexedTensor(dtype, shape, tuple(sorted(boxes)))
                for name, (dtype, shape, boxes) in sorted(self._tensors.items())
            },
            dict(sorted(self._values.items())),
        )
        check_complete(index)
        return index


def check_complete(index: CheckpointIndex) -> None:
    """Raise unless each rank of the world has one part, and every element of every tensor is held by one node, once.

    Raises:
        MissingRanks: A rank has no part.
        Incomplete: No node holds an element of a tensor.
        WriterConflict: A part or an element is there more than once, or a part belongs to no rank.
    """
    check_world(index.key, index.world, [rank for node in index.nodes for rank in node.ranks])
    for name, tensor in index.tensors.items():
        check_cover(name, tensor.shape, (box[1:] for box in tensor.boxes))


def encode_index(index: CheckpointIndex) -> bytes:
    """Return the bytes of a commit. Raises as check_complete does, ValueError when the index contradicts itself."""
    _check_index(index)
    check_complete(index)
    return lines.seal_lines(_to_plain_index(index), index.checksum)


def encode_announcement(announced: CheckpointIndex) -> bytes:
    """Return the bytes of what a node tells the committer. Raises ValueError when it contradicts itself."""
    _check_index(announced)
    return lines.seal_lines(_to_plain_index(announced), announced.checksum)


def decode_index(data: bytes, name: str) -> CheckpointIndex:
    """Return the index that encode_index() gave `data`, of a whole checkpoint. Raises Damaged, UnknownFormat."""
    index = decode_announcement(data, name)
    try:
        check_complete(index)
    except (MissingRanks, Incomplete, WriterConflict) as error:
        raise Damaged(name, f"is not whole: {error}") from error
    return index


def decode_announcement(data: bytes, name: str) -> CheckpointIndex:
    """Return what encode_announcement() gave `data`. Raises Damaged, UnknownFormat."""
    fields = lines.unseal_lines(data, name)
    # From here on it is what somebody wrote; an error is a writer's mistake.
    try:
        index = _to_typed_index(fields)
        _check_index(index)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(name, f"has a checksum that holds but is no index of format {lines.FORMAT}: {error!r}") from error
    return index


def _check_same(first: CheckpointIndex, other: CheckpointIndex) -> None:
    for what in ("key", "world", "model", "checksum"):
        ours, theirs = getattr(first, what), getattr(other, what)
        if ours != theirs:
            raise WriterConflict(
                str(other.key), f"writers of one checkpoint disagree about its {what}: {ours}, {theirs}"
            )


def _to_plain_index(index: CheckpointIndex) -> dict[str, Any]:
    return {
        "attempt": str(index.key.attempt),
        "step": index.key.step,
        "world": index.world,
        "model": index.model,
        "checksum": index.checksum,
        "created": index.created,
        "nodes": [
            {"name": node.name, "size": node.size, "sum": node.sum, "bytes": node.bytes, "ranks": node.ranks}
            for node in index.nodes
        ],
        "tensors": {
            name: {"dtype": tensor.dtype, "shape": tensor.shape, "boxes": tensor.boxes}
            for name, tensor in index.tensors.items()
        },
        "values": index.values,
    }


def _to_typed_index(fields: dict[str, Any]) -> CheckpointIndex:
    return CheckpointIndex(
        key=Key(Attempt.parse(fields["attempt"]), lines.require_number(fields["step"])),
        world=lines.require_number(fields["world"]),
        model=lines.require_text(fields["model"]),
        checksum=lines.require_text(fields["checksum"]),
        created=lines.require_seconds(fields["created"]),
        nodes=tuple(
            NodeShare(
                lines.require_text(each["name"]),
                lines.require_number(each["size"]),
                lines.require_text(each["sum"]),
                lines.require_number(each["bytes"]),
                lines.require_numbers(each["ranks"]),
            )
            for each in fields["nodes"]
        ),
        tensors={
            name: IndexedTensor(
                lines.require_text(each["dtype"]),
                lines.require_numbers(each["shape"]),
                tuple(lines.require_numbers(box) for box in each["boxes"]),
            )
            for name, each in fields["tensors"].items()
        },
        values=dict(fields["values"].items()),
    )


def _check_index(index: CheckpointIndex) -> None:
    """A reader trusts these: it computes names and sizes from them. ValueError says what does not hold."""
    if index.checksum not in ALGORITHMS:
        raise ValueError(f"no such checksum: {index.checksum}")
    if not (index.world >= 1 and index.nodes):
        raise ValueError(f"a checkpoint of {index.world} ranks on {len(index.nodes)} nodes")
    digits = get_checksum_width(index.checksum)
    for node in index.nodes:
        inside = node.name.removeprefix(index.key.data_prefix)
        if inside == node.name or not inside.endswith(f"-{node.sum}.json") or "/" in inside or inside.startswith("."):
            raise ValueError(f"{node.name} is no node manifest of {index.key.data_prefix} with sum {node.sum}")
        if not (lines.is_sum(node.sum, digits) and node.size and node.ranks):
            raise ValueError(f"{node.name} has {node.size} bytes, sum {node.sum} and ranks {node.ranks}")
    if len({node.name for node in index.nodes}) != len(index.nodes):
        raise ValueError("two nodes have the same manifest")
    for name, tensor in index.tensors.items():
        _check_tensor(name, tensor, len(index.nodes))


def _check_tensor(name: str, tensor: IndexedTensor, nodes: int) -> None:
    get_itemsize(tensor.dtype)
    count = len(tensor.shape)
    for box in tensor.boxes:
        if len(box) != 1 + 2 * count or box[0] >= nodes:
            raise ValueError(f"a box of {name} is not possible: {box}")
        for offset, size, extent in zip(box[1 : 1 + count], box[1 + count :], tensor.shape, strict=True):
            if offset + size > extent:
                raise ValueError(f"a box of {name} reaches beyond its shape {tensor.shape}")
