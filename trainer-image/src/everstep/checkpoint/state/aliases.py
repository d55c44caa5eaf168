"""Places of a nested state that hold one and the same tensor or container: found for a save, and made one again.

A checkpoint has a tensor under each of its names. An optimizer that counts in one tensor for all parameters, and finds
one for each when it goes on, would train another way without a word.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from everstep.checkpoint.state import names
from everstep.checkpoint.state.loaded import is_dtensor
from everstep.checkpoint.state.memory import WHOLE, get_local_tensor

Path = tuple[Any, ...]  # keys of dictionaries and places in lists and tuples, from the outside in

_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})


@dataclass(frozen=True)
class Aliases:
    """`groups`: paths to one object each, in the order in which they were met. `overlaps`: paths to two tensors that
    have elements in common and are not the same."""

    groups: list[list[Path]]
    overlaps: list[tuple[Path, Path]]


def find_aliases(state: Any) -> Aliases:
    """Return what a nested state holds in several places.

    Tensors are the same where they have the same elements in the same order; those without elements never are. Other
    objects that can change (dictionaries, lists, sets, arrays) are the same where they are one.
    """
    found = _Visited()
    found.visit(state, ())
    groups, overlaps = _compare_memory(found.tensors)
    groups += [paths for _, paths in found.containers.values() if len(paths) > 1]
    return Aliases(groups, overlaps)


def list_objects(state: Any) -> list[Any]:
    """Return the tensors of a nested state, and all else in it that can change."""
    found = _Visited()
    found.visit(state, ())
    return [tensor for _, tensor in found.tensors] + [each for each, _ in found.containers.values()]


def share_objects(state: Any, groups: Iterable[Sequence[Path]], keep: Collection[Any] = ()) -> Any:
    """Return the state with one object at all paths of each group: that at the first of them that is there.

    Args:
        state: Is changed.
        groups: As Aliases has them.
        keep: Objects that stay where they are; others give way to these.
    """
    kept = set(map(id, keep))
    for paths in groups:
        held = {tuple(path): each for path in paths if (each := _get_at_path(state, path)) is not _ABSENT}
        if not held:
            continue
        chosen = next((each for each in held.values() if id(each) in kept), next(iter(held.values())))
        for path, each in held.items():
            if each is not chosen and id(each) not in kept:
                state = _put_at_path(state, path, chosen)
    return state


def name_path(state: Any, path: Path) -> str:
    """Return a path as the name of what lies there."""
    pieces = []
    for key in path:
        if isinstance(state, list | tuple):
            pieces.append(f"[{key}]" if isinstance(state, list) else f"({key})")
        else:
            pieces.append(names.name_key(key) or "")
        state = state[key]
    return names.join_segments(*pieces)


def merge_groups(statements: Iterable[tuple[Path, str]]) -> list[list[Path]]:
    """Return groups of paths from pairs of a path and a label: equal labels, or equal paths, are of one group."""
    labels: dict[str, str] = {}  # a label and one that it is the same as
    known: dict[str, tuple[Path, str]] = {}

    def root(label: str) -> str:
        while labels.setdefault(label, label) != label:
            label = labels[label]
        return label

    for path, label in statements:
        _, other = known.setdefault(repr(path), (tuple(path), label))
        labels[root(label)] = root(other)
    groups: dict[str, list[Path]] = {}
    for path, label in known.values():
        groups.setdefault(root(label), []).append(path)
    return list(groups.values())


_ABSENT = object()


class _Visited:
    def __init__(self) -> None:
        self.tensors: list[tuple[Path, torch.Tensor]] = []
        self.containers: dict[int, tuple[Any, list[Path]]] = {}  # by identity

    def visit(self, value: Any, path: Path) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append((path, value))
            return
        if isinstance(value, dict | list | set | bytearray) or type(value).__name__ == "ndarray":
            _, paths = self.containers.setdefault(id(value), (value, []))
            paths.append(path)
            if len(paths) > 1:
                return
        if isinstance(value, dict):
            for key, child in value.items():
                if isinstance(child, torch.Tensor):  # most of a state
                    self.tensors.append(((*path, key), child))
                elif type(child) not in _PLAIN:
                    self.visit(child, (*path, key))
        elif isinstance(value, list | tuple) and not _PLAIN.issuperset(map(type, value)):
            for place, child in enumerate(value):
                if type(child) not in _PLAIN:
                    self.visit(child, (*path, place))


class _Span(NamedTuple):
    """The range of memory that a tensor reaches; `place`: in the order in which tensors were met."""

    device: str
    start: int
    stop: int
    place: int

    @classmethod
    def of(cls, place: int, tensor: torch.Tensor) -> _Span | None:
        """None where it has no elements, or no memory of its own: that is refused elsewhere."""
        here = get_local_tensor(tensor) if type(tensor) not in WHOLE else tensor
        try:
            start = here.data_ptr()
        except (RuntimeError, NotImplementedError):
            return None
        size = _measure_reach(here) if start else 0
        if not size:
            return None
        device = "" if here.is_cpu else str(here.device)
        return cls(device, start, start + size, place)


def _measure_reach(here: torch.Tensor) -> int:
    """Return the bytes from the first element's begin to the last one's end; 0 for a tensor without elements."""
    size: int = here.nbytes
    if not size or here.is_contiguous():
        return size
    reach: int = 1 + sum(stride * (length - 1) for stride, length in zip(here.stride(), here.shape, strict=True))
    return reach * int(here.element_size())


def _may_meet(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether any two may have memory in common: of most states none have, and each save asks."""
    starts: list[int] = []
    stops: list[int] = []
    with torch.no_grad():
        for tensor in tensors:
            here = tensor if type(tensor) in WHOLE else get_local_tensor(tensor)
            try:
                start = here.data_ptr()
            except (RuntimeError, NotImplementedError):
                continue
            if start and (size := _measure_reach(here)):
                starts.append(start)
                stops.append(start + size)
    starts.sort()
    stops.sort()
    # Apart from each other, the next begins where one has ended, in the order of both.
    return any(start < stop for start, stop in zip(starts[1:], stops, strict=False))


def _compare_memory(tensors: Sequence[tuple[Path, torch.Tensor]]) -> tuple[list[list[Path]], list[tuple[Path, Path]]]:
    groups: list[list[int]] = []
    overlaps: list[tuple[int, int]] = []
    if not _may_meet([each for _, each in tensors]):
        return [], []
    with torch.no_grad():
        spans = sorted(span for place, (_, each) in enumerate(tensors) if (span := _Span.of(place, each)) is not None)
        for cluster in _iterate_clusters(spans):
            alike: dict[tuple[object, ...], list[int]] = {}
            several: list[tuple[_Span, torch.Tensor]] = []  # one of each kind
            for span in cluster:
                tensor = tensors[span.place][1]
                here = get_local_tensor(tensor)
                key = _get_identity(tensor, here)
                if key not in alike:
                    several.append((span, here))
                alike.setdefault(key, []).append(span.place)
            groups += [sorted(places) for places in alike.values() if len(places) > 1]
            overlaps += _find_overlaps(several)
    paths = [path for path, _ in tensors]
    return (
        [[paths[place] for place in each] for each in sorted(groups)],
        [(paths[min(pair)], paths[max(pair)]) for pair in sorted(overlaps)],
    )


def _iterate_clusters(spans: Sequence[_Span]) -> Iterator[list[_Span]]:
    """Yield runs of at least two spans, each of which begins before the others before it end."""
    run: list[_Span] = []
    stop = 0
    for span in spans:
        if run and (span.device != run[0].device or span.start >= stop):
            if len(run) > 1:
                yield run
            run, stop = [], 0
        run.append(span)
        stop = max(stop, span.stop)
    if len(run) > 1:
        yield run


def _get_identity(tensor: torch.Tensor, here: torch.Tensor) -> tuple[object, ...]:
    whole = (tuple(tensor.shape), tensor.placements) if is_dtensor(tensor) else None
    bits = (here.is_conj(), here.is_neg())
    return here.data_ptr(), here.dtype, tuple(here.shape), _get_strides(here), bits, whole


def _get_strides(here: torch.Tensor) -> tuple[int, ...]:
    """Return those that count: along one element nobody goes."""
    return tuple(stride for stride, size in zip(here.stride(), here.shape, strict=True) if size > 1)


def _find_overlaps(several: Sequence[tuple[_Span, torch.Tensor]]) -> list[tuple[int, int]]:
    """Return the places of those that have elements in common with an earlier one.

    Views of one storage may lie between each other without.
    """
    if len(several) < 2:
        return []
    found: list[tuple[int, int]] = []
    reach: _Span | None = None  # the one without gaps that reaches farthest
    has_gaps = False
    for span, here in several:
        if reach is not None and span.start < reach.stop:
            found.append((reach.place, span.place))
        if span.stop - span.start != here.nbytes:
            has_gaps = True
        elif reach is None or span.stop > reach.stop:
            reach = span
    if found or not has_gaps:
        return found
    low = min(span.start for span, _ in several)
    grain = math.gcd(*(each for span, here in several for each in (span.start - low, here.element_size())))
    taken = torch.zeros((max(span.stop for span, _ in several) - low) // grain, dtype=torch.int32, device="cpu")
    for number, (span, here) in enumerate(several, 1):
        units = here.element_size() // grain
        # Along a stride of 0 is one element, however many there are of it.
        sizes = [size if stride else 1 for stride, size in zip(here.stride(), here.shape, strict=True)]
        strides = [stride * units for stride in here.stride()]
        places = torch.arange(len(taken), device="cpu").as_strided(
            (*sizes, units), (*strides, 1), (span.start - low) // grain
        )
        if other := int(taken[places].max()):
            found.append((several[other - 1][0].place, span.place))
        taken[places] = number
    return found


def _get_at_path(state: Any, path: Sequence[Any]) -> Any:
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return state


def _put_at_path(state: Any, path: Path, value: Any) -> Any:
    """Return the state with this value at a path: itself, or another tuple."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    child = _put_at_path(state[key], rest, value)
    if isinstance(state, tuple):
        return (*state[:key], child, *state[key + 1 :])
    if state[key] is not child:
        state[key] = child
    return state
