"""Decide who writes what, for all ranks at once: replicas once and spread by bytes, every element exactly once.

Pure: layouts in, shares out. All loops are over tensors, over groups of ranks or over rounds of a greedy assignment,
never over ranks times tensors: 512 ranks with 2,200 tensors each have a million boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import xxhash

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.coverage import uneven_region
from everstep.checkpoint.format.manifest import ALIGN, HEADER, get_itemsize
from everstep.checkpoint.save.layouts import LayoutNames, Ownership, box_of_span, extents_of

Ints = np.ndarray[Any, np.dtype[Any]]

_SLICE = 1 << 16  # boxes whose sizes are computed at a time


@dataclass(frozen=True)
class LayoutGroup:
    """Ranks (in order) that hold the same: boxes `spans` of `tensors`."""

    ranks: tuple[int, ...]
    tensors: LayoutNames
    spans: Ints


@dataclass(frozen=True)
class WriteShares:
    """The shares of all ranks in a save.

    Attributes:
        writes: For each rank, the places in its layout of what that rank writes.
        sizes: For each rank, the bytes of its part.
        replicas: For each group of ranks, the places in its layout of what several ranks hold, and the numbers of these
            boxes.
        names: What the tensors are called.
        tensor_of_box: The tensor of each of these boxes, by its place in `names`.
    """

    writes: tuple[Ints, ...]
    sizes: tuple[int, ...]
    replicas: tuple[tuple[Ints, Ints], ...]
    names: Sequence[str]
    tensor_of_box: Ints
    kinds: Mapping[str, tuple[str, tuple[int, ...]]] = field(repr=False)


def share_writes(groups: Sequence[LayoutGroup]) -> WriteShares:
    """Assign each box to one of the ranks that hold it: to whoever has least, the largest first.

    Boxes that few ranks hold are assigned first, those that many hold fill up what is left (longest processing time
    first; Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).

    Args:
        groups: All ranks, each of them in one group.

    Raises:
        CheckpointError: The ranks do not hold each element of each tensor, or not in the same boxes, or disagree about
            the type or shape of a tensor. Names ranks.
    """
    table = _Table(groups)
    boxes = _Boxes(table, groups)
    _check_cover(table, boxes, groups)
    world = sum(len(group.ranks) for group in groups)
    bytes_of = [_bytes_of(group) for group in groups]
    own_places = [np.flatnonzero(group.tensors.claim_codes == Ownership.OWN) for group in groups]
    loads = np.zeros(world, np.int64)
    for group, size, own in zip(groups, bytes_of, own_places, strict=True):
        loads[list(group.ranks)] += int(size[own].sum())
    owners = _assign_writers(boxes, groups, loads)
    writes: list[list[Ints]] = [[] for _ in range(world)]
    for number, group in enumerate(groups):
        for rank in group.ranks:
            writes[rank].append(own_places[number])
    group_of_rank = np.empty(world, np.int32)
    for number, group in enumerate(groups):
        group_of_rank[list(group.ranks)] = number
    owner_of_entry = owners[boxes.box]
    chosen = np.flatnonzero(group_of_rank[owner_of_entry] == boxes.group)
    by_owner = chosen[np.argsort(owner_of_entry[chosen], kind="stable")]
    cuts = np.searchsorted(owner_of_entry[by_owner], np.arange(world + 1))
    for rank in range(world):
        writes[rank].append(boxes.place[by_owner[cuts[rank] : cuts[rank + 1]]])
    found = tuple(np.sort(np.concatenate(each)).astype(np.int32) for each in writes)
    sizes = tuple(_part_size(bytes_of[number][each]) for number, each in zip(group_of_rank, found, strict=True))
    replicas = tuple(_iterate_replicas(boxes, groups))
    return WriteShares(found, sizes, replicas, table.names, boxes.tensor, table.kinds)


class _Table:
    """All tensors that ranks share, by number; and the numbers of those of each group."""

    def __init__(self, groups: Sequence[LayoutGroup]) -> None:
        self.names: list[str] = []
        self.kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._first: dict[str, int] = {}  # the rank that named a tensor first
        numbers: dict[str, int] = {}
        known: dict[int, Ints] = {}
        self.of_group: list[Ints] = []
        for group in groups:
            tensors = group.tensors
            if id(tensors) not in known:
                known[id(tensors)] = np.fromiter(self._number(group, numbers), np.int32, len(tensors.names))
            self.of_group.append(known[id(tensors)])
        self.shapes = [self.kinds[name][1] for name in self.names]

    def _number(self, group: LayoutGroup, numbers: dict[str, int]) -> Iterator[int]:
        tensors, rank = group.tensors, group.ranks[0]
        for name, dtype, shape, claim in zip(
            tensors.names, tensors.dtypes, tensors.shapes, tensors.claims, strict=True
        ):
            if claim is Ownership.OWN:
                self.kinds.setdefault(f"rank.*.{name}", (dtype, shape))
                yield -1
                continue
            if name not in numbers:
                numbers[name] = len(numbers)
                self.names.append(name)
                self.kinds[name] = (dtype, shape)
                self._first[name] = rank
            elif self.kinds[name] != (dtype, shape):
                there, other = self._first[name], self.kinds[name]
                raise CheckpointError(
                    f"{name} is {other[0]} {list(other[1])} on rank {there} and {dtype} {list(shape)} on rank {rank}: "
                    "one name is one tensor; give these different names, or save what each rank has for itself as "
                    "PerRank(…)"
                )
            yield numbers[name]


class _Boxes:
    """Each box that somebody holds once, in the order of (tensor, first, last); and each entry, a group that holds one.

    Of boxes: `tensor`, `first`, `last`, `volume` (elements), `size` (bytes), `start` (its first entry), `count` (of
    groups). Of entries, in the order of boxes and groups: `box`, `group`, `place` (in the group's layout).
    """

    def __init__(self, table: _Table, groups: Sequence[LayoutGroup]) -> None:
        numel = np.array([prod(shape) for shape in table.shapes], np.int64)
        tensors, firsts, lasts, owners, places = [], [], [], [], []
        for number, (group, ids) in enumerate(zip(groups, table.of_group, strict=True)):
            claims = group.tensors.claim_codes
            held = group.spans[:, 1] >= group.spans[:, 0]
            place = np.flatnonzero((claims == Ownership.SHARED) & (held | (numel[ids] == 0 if len(numel) else held)))
            tensors.append(ids[place])
            firsts.append(group.spans[place, 0])
            lasts.append(group.spans[place, 1])
            owners.append(np.full(len(place), number, np.int32))
            places.append(place.astype(np.int32))
        tensor, first, last = np.concatenate(tensors), np.concatenate(firsts), np.concatenate(lasts)
        del tensors, firsts, lasts
        order = np.lexsort((last, first, tensor))  # stable: groups stay in order
        tensor, first, last = tensor[order], first[order], last[order]
        self.group = np.concatenate(owners)[order]
        self.place = np.concatenate(places)[order]
        fresh = np.ones(len(tensor), bool)
        fresh[1:] = (tensor[1:] != tensor[:-1]) | (first[1:] != first[:-1]) | (last[1:] != last[:-1])
        self.box = np.cumsum(fresh, dtype=np.int32) - 1
        self.start = np.flatnonzero(fresh)
        self.count = np.diff(np.append(self.start, len(tensor)))
        self.tensor, self.first, self.last = tensor[fresh], first[fresh], last[fresh]
        self.volume = _compute_volumes(self.tensor, self.first, self.last, extents_of(table.shapes))
        width = np.array([get_itemsize(table.kinds[name][0]) for name in table.names], np.int64)
        self.size = self.volume * width[self.tensor] if len(width) else self.volume
        self.of_tensor = np.searchsorted(self.tensor, np.arange(len(table.names) + 1))


def _compute_volumes(tensor: Ints, first: Ints, last: Ints, extents: Ints) -> Ints:
    """Return the elements of each box; `extents` of all tensors as LayoutNames has them."""
    volume = np.ones(len(tensor), np.int64)
    for low in range(0, len(tensor), _SLICE):
        part = slice(low, low + _SLICE)
        one, other = first[part], last[part]
        for dim in range(extents.shape[1]):
            extent = extents[tensor[part], dim]
            volume[part] *= other % extent - one % extent + 1
            one, other = one // extent, other // extent
    volume[last < first] = 0
    return volume


def _check_cover(table: _Table, boxes: _Boxes, groups: Sequence[LayoutGroup]) -> None:
    """Raise CheckpointError unless the boxes of each tensor cover it exactly once."""
    seen: set[tuple[tuple[int, ...], bytes]] = set()  # most layers of a model are cut alike
    for number, name in enumerate(table.names):
        low, high = boxes.of_tensor[number], boxes.of_tensor[number + 1]
        shape = table.shapes[number]
        if low == high:
            raise CheckpointError(f"{name} is held by no rank that could save it: the rank that it is to come from "
                                  f"is none of 0 to {sum(len(group.ranks) for group in groups) - 1}")  # fmt: skip
        first, last = boxes.first[low:high], boxes.last[low:high]
        numel = prod(shape)
        if high - low == 1 and first[0] == 0 and last[0] == numel - 1 and boxes.volume[low] == numel:
            continue
        pattern = (shape, xxhash.xxh3_128_digest(first.tobytes() + last.tobytes()))
        if pattern in seen:
            continue
        if not _is_in_rows(first, last, boxes.volume[low:high], numel):
            found = [box_of_span(shape, int(one), int(other)) for one, other in zip(first, last, strict=True)]
            uneven = uneven_region(shape, found)
            if uneven is not None:
                raise CheckpointError(_explain_disagreement(name, *uneven, found, [groups[each].ranks[0] for each in
                                      boxes.group[boxes.start[low:high]]]))  # fmt: skip
        seen.add(pattern)


def _is_in_rows(first: Ints, last: Ints, volume: Ints, numel: int) -> bool:
    """Tell whether boxes, in order, are one run of elements each, and follow each other from the first to the last."""
    follow = first[0] == 0 and last[-1] == numel - 1 and np.array_equal(first[1:], last[:-1] + 1)
    return bool(follow and np.array_equal(volume, last - first + 1))


def _explain_disagreement(
    name: str,
    region: tuple[tuple[int, int], ...],
    count: int,
    boxes: Sequence[tuple[tuple[int, int], ...]],
    ranks: Sequence[int],
) -> str:
    where = f"{name}[{', '.join(f'{start}:{stop}' for start, stop in region)}]"
    if count == 0:
        return f"{where} is held by no rank: the ranks' shards of this tensor are not all of it"
    holders = [
        f"rank {rank} ([{', '.join(f'{start}:{stop}' for start, stop in box)}])"
        for box, rank in zip(boxes, ranks, strict=True)
        if all(start <= low and high <= stop for (start, stop), (low, high) in zip(box, region, strict=True))
    ]
    return (
        f"{where} is held in boxes that overlap and are not the same, by {' and '.join(holders[:2])}: "
        "one name is one tensor, cut in one way"
    )


def _assign_writers(boxes: _Boxes, groups: Sequence[LayoutGroup], loads: Ints) -> Ints:
    """Return the rank that writes each box. `loads`: the bytes of each rank so far."""
    owners = np.zeros(len(boxes.tensor), np.int32)
    by_holders: dict[int, list[tuple[Ints, Ints]]] = defaultdict(list)
    for ranks, members in _iterate_classes(boxes, groups):
        by_holders[len(ranks)].append((ranks, members))
    for count in sorted(by_holders):
        for batch in _iterate_disjoint_batches(by_holders[count], len(loads)):
            _spread_boxes(batch, boxes.size, owners, loads)
    return owners


def _iterate_classes(boxes: _Boxes, groups: Sequence[LayoutGroup]) -> Iterator[tuple[Ints, Ints]]:
    """Boxes by who holds them: (ranks in order, boxes in order)."""
    for count in np.unique(boxes.count):
        rows = np.flatnonzero(boxes.count == count)
        holders = boxes.group[boxes.start[rows][:, None] + np.arange(count)]
        key = holders[:, 0] if count == 1 else np.ascontiguousarray(holders).view(f"V{4 * count}").ravel()
        _, examples, which = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(which, kind="stable")
        cuts = np.searchsorted(which[order], np.arange(len(examples) + 1))
        for number, example in enumerate(examples):
            ranks = np.sort(np.concatenate([np.array(groups[each].ranks) for each in holders[example]]))
            yield ranks, rows[order[cuts[number] : cuts[number + 1]]]


def _iterate_disjoint_batches(classes: Sequence[tuple[Ints, Ints]], world: int) -> Iterator[list[tuple[Ints, Ints]]]:
    """Yield the same classes in batches, in which no two share a rank."""
    batch: list[tuple[Ints, Ints]] = []
    taken = np.zeros(world, bool)
    for ranks, members in classes:
        if taken[ranks].any():
            yield batch
            batch, taken = [], np.zeros(world, bool)
        taken[ranks] = True
        batch.append((ranks, members))
    if batch:
        yield batch


def _spread_boxes(classes: list[tuple[Ints, Ints]], size: Ints, owners: Ints, loads: Ints) -> None:
    """Each class gives its next box, the largest first, to that of its ranks which has least; all classes at once."""
    classes.sort(key=lambda each: -len(each[1]))
    holders = np.stack([ranks for ranks, _ in classes])
    if holders.shape[1] == 1:
        for (rank,), members in classes:
            owners[members] = rank
            loads[rank] += size[members].sum()
        return
    ordered = [members[np.argsort(-size[members], kind="stable")] for _, members in classes]
    lengths = np.array([len(members) for members in ordered])
    table = np.zeros((len(ordered), lengths[0]), np.int32)
    for row, members in zip(table, ordered, strict=True):
        row[: len(members)] = members
    for turn in range(lengths[0]):
        active = int(np.searchsorted(-lengths, -turn))  # classes with more boxes than that
        least = np.argmin(loads[holders[:active]], axis=1)
        ranks, given = holders[np.arange(active), least], table[:active, turn]
        owners[given] = ranks
        loads[ranks] += size[given]


def _iterate_replicas(boxes: _Boxes, groups: Sequence[LayoutGroup]) -> Iterator[tuple[Ints, Ints]]:
    """Yield, for each group, places and boxes of what several ranks hold, in the order of places."""
    ranks = np.array([len(group.ranks) for group in groups])
    holders = np.add.reduceat(ranks[boxes.group], boxes.start) if len(boxes.start) else np.empty(0, int)
    several = np.flatnonzero(holders[boxes.box] > 1)
    several = several[np.lexsort((boxes.place[several], boxes.group[several]))]
    cuts = np.searchsorted(boxes.group[several], np.arange(len(groups) + 1))
    for low, high in pairwise(cuts):
        yield boxes.place[several[low:high]], boxes.box[several[low:high]]


def _bytes_of(group: LayoutGroup) -> Ints:
    """Return the bytes of each box of a layout."""
    tensors, spans = group.tensors, group.spans
    volumes = _compute_volumes(np.arange(len(spans)), spans[:, 0], spans[:, 1], tensors.extents)
    return np.asarray(volumes * tensors.widths)


def _part_size(sizes: Ints) -> int:
    """Return the bytes of a part with boxes of these bytes, the largest first: each begins at a multiple of ALIGN."""
    if not len(sizes):
        return HEADER
    last = int(sizes.min())
    whole = int((-(-sizes // ALIGN) * ALIGN).sum())
    return HEADER + whole - (-last % ALIGN)
