"""Many manifests become one, and the result says exactly once where every element is."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from everstep.checkpoint.errors import Conflict, Incomplete, MissingRanks
from everstep.checkpoint.format import Chunk, Manifest, Part, Shard, Tensor

Box = tuple[tuple[int, int], ...]  # (start, stop) for each dimension


def merge(node_manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of a whole checkpoint from those of all its nodes, at least one.

    MissingRanks: a rank's part is missing. Incomplete: an element of a tensor is in no shard. Conflict: one is in two,
    or the nodes disagree about a tensor, a plain value or what they saved.
    """
    merged = replace(join(node_manifests), nodes=len(node_manifests))
    check_whole(merged)
    return merged


def check_whole(manifest: Manifest) -> None:
    """MissingRanks, Incomplete or Conflict unless each rank of its world has a part, nobody else has one, and every
    element of every tensor is in exactly one shard."""
    _check_world(manifest)
    for name, tensor in manifest.tensors.items():
        _check_cover(name, tensor)


def join(manifests: Sequence[Manifest]) -> Manifest:
    """One manifest with all parts, shards and values of these (a node's from its ranks'), complete or not. Conflict."""
    first = manifests[0]
    parts: list[Part] = []
    tensors: dict[str, Tensor] = {}
    shards: dict[str, list[Shard]] = defaultdict(list)
    values: dict[str, object] = {}
    for manifest in manifests:
        _check_same(first, manifest)
        for name, tensor in manifest.tensors.items():
            known = tensors.setdefault(name, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                one, other = f"{known.dtype} {known.shape}", f"{tensor.dtype} {tensor.shape}"
                raise Conflict(name, f"{one} for one writer, {other} for another")
            shards[name].extend(_moved(shard, len(parts)) for shard in tensor.shards)
        for name, value in manifest.values.items():
            if name in values and _text(values[name]) != _text(value):
                raise Conflict(name, f"two writers disagree about this value: {_short(values[name])}, {_short(value)}")
            values[name] = value
        parts.extend(manifest.parts)
    seen: set[str] = set()
    for part in parts:
        if part.name in seen:
            raise Conflict(part.name, "two writers name this part")
        seen.add(part.name)
    return replace(
        first,
        created=max(each.created for each in manifests),
        parts=tuple(parts),
        # In the order in which encode() writes them: containers get their content back in it.
        tensors={
            name: Tensor(known.dtype, known.shape, tuple(shards[name])) for name, known in sorted(tensors.items())
        },
        values=dict(sorted(values.items())),
    )


def _check_world(manifest: Manifest) -> None:
    there = {part.name for part in manifest.parts}
    missing = [rank for rank in range(manifest.world) if manifest.key.part_name(rank) not in there]
    if missing:
        raise MissingRanks(str(manifest.key), manifest.world, missing)
    if len(manifest.parts) != manifest.world:
        strange = min(there - {manifest.key.part_name(rank) for rank in range(manifest.world)})
        raise Conflict(strange, f"is the part of no rank of a checkpoint of {manifest.world} ranks")


def _check_same(first: Manifest, other: Manifest) -> None:
    for what in ("key", "world", "model", "checksum"):
        ours, theirs = getattr(first, what), getattr(other, what)
        if ours != theirs:
            raise Conflict(str(other.key), f"writers of one checkpoint disagree about its {what}: {ours}, {theirs}")


def _moved(shard: Shard, by: int) -> Shard:
    """The same shard where its manifest's parts come after `by` others."""
    if not by:
        return shard
    return Shard(shard.offsets, shard.sizes, tuple(Chunk(c.part + by, c.offset, c.length, c.sum) for c in shard.chunks))


def _text(value: object) -> str:
    # Not ==: for Python 1, 1.0 and True are equal.
    return json.dumps(value, sort_keys=True)


def _short(value: object) -> str:
    text = _text(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_cover(name: str, tensor: Tensor) -> None:
    if len(tensor.shards) == 1 and tensor.shards[0].sizes == tensor.shape and not any(tensor.shards[0].offsets):
        return  # most tensors
    boxes = [
        tuple((start, start + size) for start, size in zip(shard.offsets, shard.sizes, strict=True))
        for shard in tensor.shards
        if 0 not in shard.sizes
    ]
    found = uneven_region(tensor.shape, boxes) if 0 not in tensor.shape else None
    if found is None:
        return
    region, count = found
    if count == 0:
        raise Incomplete(name, region)
    raise Conflict(name, f"[{', '.join(f'{start}:{stop}' for start, stop in region)}] was written {count} times")


def uneven_region(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[Box, int] | None:
    """A region that not exactly one box covers, and how many do.

    Cuts the first dimension where a box begins or ends; between two cuts the same boxes hold, and the question is that
    of the other dimensions.
    """
    if not shape:
        return None if len(boxes) == 1 else ((), len(boxes))
    cuts = sorted({0, shape[0], *(box[0][0] for box in boxes), *(box[0][1] for box in boxes)})
    waiting = sorted(boxes, key=lambda box: box[0][0], reverse=True)
    active: list[Box] = []
    for low, high in pairwise(cuts):
        active = [box for box in active if box[0][1] > low]
        while waiting and waiting[-1][0][0] == low:
            active.append(waiting.pop())
        found = uneven_region(shape[1:], [box[1:] for box in active])
        if found:
            return ((low, high), *found[0]), found[1]
    return None
