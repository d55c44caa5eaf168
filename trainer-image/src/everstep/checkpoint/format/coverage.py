"""Check that boxes cover a tensor, each element once, and join boxes that lie side by side into one. Pure.

A box is flat, as in an index: its offsets, then its sizes, one number for each dimension.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from everstep.checkpoint.errors import Incomplete, MissingRanks, WriterConflict
from everstep.checkpoint.format.keys import Key

FlatBox = tuple[int, ...]
Region = tuple[tuple[int, int], ...]  # (start, stop) for each dimension


def check_world(key: Key, world: int, ranks: Sequence[int]) -> None:
    """Raise MissingRanks or WriterConflict unless these are the ranks of the world, each once."""
    missing = sorted(set(range(world)) - set(ranks))
    if missing:
        raise MissingRanks(str(key), world, missing)
    if len(ranks) != world:
        strange = sorted(rank for rank in set(ranks) if rank >= world or ranks.count(rank) > 1)[0]
        why = "two nodes name it" if strange < world else f"is the part of no rank of a checkpoint of {world} ranks"
        raise WriterConflict(key.part_name(strange), why)


def check_cover(name: str, shape: tuple[int, ...], boxes: Iterable[FlatBox]) -> None:
    """Raise Incomplete or WriterConflict unless every element of the tensor is in exactly one box."""
    if 0 in shape:
        return
    count = len(shape)
    found = [box for box in boxes if 0 not in box[count:]]
    if _are_slices(shape, found):
        return  # most tensors: whole, or in slices of their first dimension
    regions = [tuple((box[i], box[i] + box[count + i]) for i in range(count)) for box in found]
    uneven = uneven_region(shape, regions)
    if uneven is None:
        return
    region, times = uneven
    if times == 0:
        raise Incomplete(name, region)
    raise WriterConflict(name, f"[{', '.join(f'{start}:{stop}' for start, stop in region)}] was written {times} times")


def join_boxes(count: int, boxes: Iterable[FlatBox]) -> list[FlatBox]:
    """Return boxes, of `count` dimensions, that hold the same elements equally often: those side by side are one."""
    found = [box for box in boxes if 0 not in box[count:]]
    for dim in range(count):
        if len(found) < 2:
            break
        size = count + dim
        rows: dict[FlatBox, list[FlatBox]] = defaultdict(list)
        for box in found:
            rows[box[:dim] + box[dim + 1 : size] + box[size + 1 :]].append(box)
        found = []
        for row in rows.values():
            row.sort(key=lambda box: box[dim])
            last = row[0]
            for box in row[1:]:
                if box[dim] == last[dim] + last[size]:
                    last = (*last[:size], last[size] + box[size], *last[size + 1 :])
                else:
                    found.append(last)
                    last = box
            found.append(last)
    return sorted(found)


def overlaps_region(box: FlatBox, region: Region) -> bool:
    """Tell whether the box holds an element of the region."""
    count = len(region)
    return all(
        box[i] < stop and start < box[i] + box[count + i] and box[count + i] and start < stop
        for i, (start, stop) in enumerate(region)
    )


def _are_slices(shape: tuple[int, ...], boxes: Sequence[FlatBox]) -> bool:
    """Tell whether the boxes are one slice of the first dimension after another, from its beginning to its end."""
    if not shape:
        return len(boxes) == 1
    count, zeros, others = len(shape), (0,) * (len(shape) - 1), shape[1:]
    slices = []
    for box in boxes:
        if box[1:count] != zeros or box[count + 1 :] != others:
            return False
        slices.append((box[0], box[count]))
    slices.sort()
    at = 0
    for start, size in slices:
        if start != at:
            return False
        at += size
    return at == shape[0]


def uneven_region(shape: tuple[int, ...], boxes: Sequence[Region]) -> tuple[Region, int] | None:
    """Return a region that not exactly one box covers, and how many do; None when there is none.

    Cuts the first dimension where a box begins or ends; between two cuts the same boxes hold, and the question is that
    of the other dimensions.
    """
    if not shape:
        return None if len(boxes) == 1 else ((), len(boxes))
    cuts = sorted({0, shape[0], *(box[0][0] for box in boxes), *(box[0][1] for box in boxes)})
    waiting = sorted(boxes, key=lambda box: box[0][0], reverse=True)
    active: list[Region] = []
    for low, high in pairwise(cuts):
        active = [box for box in active if box[0][1] > low]
        while waiting and waiting[-1][0][0] == low:
            active.append(waiting.pop())
        found = uneven_region(shape[1:], [box[1:] for box in active])
        if found:
            return ((low, high), *found[0]), found[1]
    return None
