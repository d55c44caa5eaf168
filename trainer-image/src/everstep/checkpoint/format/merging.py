"""Many manifests become one, and the result says exactly once where every element is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from everstep.checkpoint.errors import WriterConflict
from everstep.checkpoint.format.coverage import check_cover, check_world
from everstep.checkpoint.format.manifest import CheckpointPart, Chunk, Manifest, Shard, StoredTensor
from everstep.checkpoint.format.nested_names import check_states, join_values


def merge_node_manifests(node_manifests: Sequence[Manifest]) -> Manifest:
    """Return the manifest of a whole checkpoint from those of all its nodes, at least one.

    Raises:
        MissingRanks: A rank's part is missing.
        Incomplete: An element of a tensor is in no shard.
        WriterConflict: An element is in two shards, or the nodes disagree about a tensor, a plain value, how a state is
            built or what they saved.
    """
    merged = replace(join_manifests(node_manifests), nodes=len(node_manifests))
    check_whole(merged)
    check_states(merged.tensors, merged.values)
    return merged


def check_whole(manifest: Manifest) -> None:
    """Raise unless each rank of the world has a part, nobody else has one, and each element is in exactly one shard.

    Raises:
        MissingRanks: A rank has no part.
        Incomplete: An element of a tensor is in no shard.
        WriterConflict: Somebody else has a part, a rank has two, or an element is in two shards.
    """
    check_world(manifest.key, manifest.world, [manifest.key.rank_of(part.name) for part in manifest.parts])
    for name, tensor in manifest.tensors.items():
        check_cover(name, tensor.shape, ((*shard.offsets, *shard.sizes) for shard in tensor.shards))


def join_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Return one manifest with all parts, shards and values of these (a node's from its ranks'), complete or not.

    Raises:
        WriterConflict: The manifests disagree.
    """
    first = manifests[0]
    parts: list[CheckpointPart] = []
    tensors: dict[str, StoredTensor] = {}
    shards: dict[str, list[Shard]] = defaultdict(list)
    values: dict[str, object] = {}
    for manifest in manifests:
        _check_same(first, manifest)
        for name, tensor in manifest.tensors.items():
            known = tensors.setdefault(name, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                one, other = f"{known.dtype} {known.shape}", f"{tensor.dtype} {tensor.shape}"
                raise WriterConflict(name, f"{one} for one writer, {other} for another")
            shards[name].extend(_move_shard(shard, len(parts)) for shard in tensor.shards)
        join_values(values, manifest.values)
        parts.extend(manifest.parts)
    seen: set[str] = set()
    for part in parts:
        if part.name in seen:
            raise WriterConflict(part.name, "two writers name this part")
        seen.add(part.name)
    return replace(
        first,
        created=max(each.created for each in manifests),
        parts=tuple(parts),
        # In the order in which encode() writes them: containers get their content back in it.
        tensors={
            name: StoredTensor(known.dtype, known.shape, tuple(shards[name])) for name, known in sorted(tensors.items())
        },
        values=dict(sorted(values.items())),
    )


def _check_same(first: Manifest, other: Manifest) -> None:
    for what in ("key", "world", "model", "checksum"):
        ours, theirs = getattr(first, what), getattr(other, what)
        if ours != theirs:
            raise WriterConflict(
                str(other.key), f"writers of one checkpoint disagree about its {what}: {ours}, {theirs}"
            )


def _move_shard(shard: Shard, by: int) -> Shard:
    """Return the same shard where its manifest's parts come after `by` others."""
    if not by:
        return shard
    return Shard(shard.offsets, shard.sizes, tuple(Chunk(c.part + by, c.offset, c.length, c.sum) for c in shard.chunks))
