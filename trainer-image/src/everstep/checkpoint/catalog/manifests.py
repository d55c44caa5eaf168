"""Reading what a checkpoint consists of: its index, and of the node manifests those that somebody needs.

    index = read_index(store, key)                          # small: names, shapes, values, which node holds which box
    read_manifest(store, key)                               # all of it
    nodes = index.nodes_of({"model.weight": [((0, 128), (0, 64))]})
    read_manifest(store, key, nodes=nodes, index=index)     # only what these nodes hold

What is read is checked against the index, so that a manifest of some nodes is as trustworthy as the whole one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from everstep.checkpoint.errors import Damaged, Incomplete, MissingRanks, WriterConflict
from everstep.checkpoint.format.checksum import compute_checksum
from everstep.checkpoint.format.index import CheckpointIndex, decode_index, held_boxes
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import Manifest, StoredTensor, decode_manifest
from everstep.checkpoint.format.merging import check_whole, join_manifests
from everstep.checkpoint.host.thread_pool import ThreadPool
from everstep.checkpoint.store.base import Store

_THREADS = 8  # node manifests that are read at a time


def read_index(store: Store, key: Key) -> CheckpointIndex:
    """Return the index of a committed checkpoint.

    Raises:
        Missing: It is not there.
        Damaged: It does not hold, is not whole or is another checkpoint's.
        UnknownFormat: Another version of everstep wrote it.
    """
    return parse_index(key, store.read(key.manifest_name))


def parse_index(key: Key, data: bytes) -> CheckpointIndex:
    """Return the same from the bytes of the object. Raises Damaged, UnknownFormat."""
    index = decode_index(data, key.manifest_name)
    if index.key != key:
        raise Damaged(key.manifest_name, f"is the manifest of another checkpoint, {index.key}")
    return index


def read_manifest(
    store: Store, key: Key, *, nodes: Collection[int] | None = None, index: CheckpointIndex | None = None
) -> Manifest:
    """Return the manifest of a checkpoint, or of what some of its nodes hold.

    Args:
        store: Where it is.
        key: Which one.
        nodes: The nodes whose manifests are read; all by default. Tensors of which they hold nothing have no shards,
            and only the ranks of these nodes have their own values.
        index: The checkpoint's index, where the caller has read it already.

    Raises:
        Missing: It is not there, or a node manifest is not.
        Damaged: Something of it does not hold.
        UnknownFormat: Another version of everstep wrote it.
    """
    index = read_index(store, key) if index is None else index
    numbers = sorted(range(len(index.nodes)) if nodes is None else set(nodes))
    if len(numbers) < 2:
        return assemble_manifest(index, {number: read_node(store, index, number) for number in numbers})
    with ThreadPool(min(_THREADS, len(numbers)), thread_name_prefix="manifests") as pool:
        found = list(pool.map(lambda number: read_node(store, index, number), numbers))
    return assemble_manifest(index, dict(zip(numbers, found, strict=True)))


def read_node(store: Store, index: CheckpointIndex, node: int) -> Manifest:
    """Return what one node of a checkpoint wrote. Raises Missing, Damaged."""
    return parse_node(index, node, store.read(index.nodes[node].name))


def parse_node(index: CheckpointIndex, node: int, data: bytes) -> Manifest:
    """Return the node manifest that `data` is, if the index speaks of exactly that. Raises Damaged."""
    share = index.nodes[node]
    if len(data) != share.size or compute_checksum(index.checksum, data) != share.sum:
        raise Damaged(share.name, "is not the node manifest that the index of its checkpoint names")
    manifest = decode_manifest(data, share.name)
    for what in ("key", "world", "model", "checksum"):
        if getattr(manifest, what) != getattr(index, what):
            raise Damaged(share.name, f"has another {what} than the index of its checkpoint")
    if _list_part_ranks(manifest) != sorted(share.ranks):
        raise Damaged(share.name, f"has other parts than those of ranks {share.ranks}")
    held = {name: [box[1:] for box in tensor.boxes if box[0] == node] for name, tensor in index.tensors.items()}
    for name, boxes in held.items():
        tensor, known = manifest.tensors.get(name), index.tensors[name]
        shards = () if tensor is None else tensor.shards
        if held_boxes(len(known.shape), shards) != boxes or (
            tensor is not None and (tensor.dtype, tensor.shape) != (known.dtype, known.shape)
        ):
            raise Damaged(share.name, f"has other shards of {name} than the index of its checkpoint says")
    if not manifest.tensors.keys() <= held.keys():
        raise Damaged(share.name, "has a tensor that the index of its checkpoint does not name")
    return manifest


def _list_part_ranks(manifest: Manifest) -> list[int] | None:
    """Return the ranks whose parts these are, in order; None where one has another name."""
    try:
        return sorted(manifest.key.rank_of(part.name) for part in manifest.parts)
    except ValueError:
        return None


def assemble_manifest(index: CheckpointIndex, manifests: Mapping[int, Manifest]) -> Manifest:
    """Return one manifest of what these nodes hold; see read_manifest. Raises Damaged when two disagree."""
    try:
        if manifests:
            joined = join_manifests([manifests[number] for number in sorted(manifests)])
        else:
            joined = Manifest(index.key, index.world, 1, index.model, index.checksum, index.created, (), {}, {})
    except WriterConflict as error:
        raise Damaged(index.key.manifest_name, f"is not whole: {error}") from error
    return replace(
        joined,
        nodes=len(index.nodes),
        created=index.created,
        tensors={
            name: joined.tensors.get(name, StoredTensor(tensor.dtype, tensor.shape, ()))
            for name, tensor in index.tensors.items()
        },
        values=dict(sorted({**joined.values, **index.values}.items())),
    )


def parse_manifest(key: Key, data: bytes) -> Manifest:
    """Return a whole manifest that was put together somewhere else and encoded. Raises UnknownFormat, Damaged."""
    manifest = decode_manifest(data, key.manifest_name)
    if manifest.key != key:
        raise Damaged(key.manifest_name, f"is the manifest of another checkpoint, {manifest.key}")
    try:
        check_whole(manifest)
    except (MissingRanks, Incomplete, WriterConflict) as error:
        raise Damaged(key.manifest_name, f"is not whole: {error}") from error
    return manifest
