"""Compare what ranks hold under one name besides the bytes of tensors: plain values, and how states are built.

Ranks send a checksum of each value. Where one rank holds a value and another a tensor, or something that lies in a
dictionary of that name, the names tell it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.descriptions import BUILT_AMONG, is_description, object_of
from everstep.checkpoint.format.nested_names import find_contradiction, is_empty

ADVICE = (
    "One name is one value. If these should be equal, make them so before saving (broadcast them from one rank; of "
    "buffers under DDP, give the DDP and not the model within it). To save what one rank has, give the object as "
    "FromRank(…); to save what each rank has for itself, give it as PerRank(…), or give different things different "
    "names."
)

_NONE, _EMPTY = "-", "+"  # what a sum begins with, of a value in whose place another rank may hold more
_TENSOR, _VALUE, _NOTHING, _CONTAINER = "a tensor", "a plain value", "None", "an empty container"


def mark_value(checksum: str, packed: object) -> str:
    """Return the sum of a packed value that is sent: of None and of an empty container it says what it is of."""
    return f"{(_NONE if packed is None else _EMPTY) if is_empty(packed) else ''}{checksum}"


def check_values(sums: Sequence[Mapping[str, str]]) -> None:
    """See that no two ranks have different plain values under one name, or have built one state in different ways.

    None and empty containers of a nested state give way to what another rank has, see nested_names.join_values().

    Args:
        sums: Of each rank: by name, what mark_value() gives, or the words of a structure.

    Raises:
        CheckpointError: Two ranks have, with the name and both.
    """
    first: dict[str, tuple[str, int]] = {}
    seen: set[int] = set()  # ranks that hold the same share one object
    for rank, held in enumerate(sums):
        if id(held) in seen:
            continue
        seen.add(id(held))
        nested = _list_nested(held)
        for name, sum_ in held.items():
            known, holder = first.setdefault(name, (sum_, rank))
            thing, is_structure, _ = name.partition(BUILT_AMONG)
            if known != sum_ and is_structure:
                raise CheckpointError(
                    f"{thing} is not built the same on rank {holder} ({known}) and on rank {rank} ({sum_}): "
                    "dictionaries have another order or kind, or one object is in several places on one of them only. "
                    "Make them in the same order and share the same on all ranks, or give the object as FromRank(…) or "
                    "PerRank(…)"
                )
            if known != sum_ and object_of(name) in nested and _gives_way(known, sum_):
                first[name] = sum_, rank
            elif known != sum_ and not (object_of(name) in nested and _gives_way(sum_, known)):
                raise CheckpointError(f"{name} is not the same value on rank {holder} and on rank {rank}. {ADVICE}")


def check_names(held: Sequence[tuple[Iterable[str], Mapping[str, str]]]) -> None:
    """See that the leaves of nested states that ranks hold are those of one state.

    Args:
        held: Of each rank, the names of its tensors that others may have too, and the sums of its values.

    Raises:
        CheckpointError: They are not, with two names and the ranks that hold them.
    """
    nested = set[str]().union(*map(_list_nested, {id(sums): sums for _, sums in held}.values()))
    leaves: dict[str, tuple[str, int]] = {}
    seen: set[tuple[int, int]] = set()
    for rank, (tensors, sums) in enumerate(held):
        if (id(tensors), id(sums)) in seen:
            continue
        seen.add((id(tensors), id(sums)))
        kinds = {name: _kind_of(sum_) for name, sum_ in sums.items() if BUILT_AMONG not in name}
        kinds |= dict.fromkeys(tensors, _TENSOR)  # of an array there are both
        for name, kind in kinds.items():
            if object_of(name) not in nested or is_description(name):
                continue
            known, holder = leaves.setdefault(name, (kind, rank))
            if known == _NOTHING:
                leaves[name] = kind, rank
            elif known != kind and kind != _NOTHING and _TENSOR in (known, kind):
                raise CheckpointError(f"{name} is {known} on rank {holder} and {kind} on rank {rank}. {ADVICE}")
    found = find_contradiction({name: kind in (_TENSOR, _VALUE) for name, (kind, _) in leaves.items()})
    if found is not None:
        one, other = ((name, leaves[name][1]) for name in found)
        raise CheckpointError(
            f"rank {one[1]} holds {one[0]}, and rank {other[1]} {other[0]}: no state has both. {ADVICE}"
        )


def _kind_of(sum_: str) -> str:
    return _NOTHING if sum_.startswith(_NONE) else _CONTAINER if sum_.startswith(_EMPTY) else _VALUE


def _list_nested(sums: Mapping[str, str]) -> set[str]:
    return {object_of(name) for name in sums if is_description(name)}


def _gives_way(sum_: str, other: str) -> bool:
    """Tell whether the value of one sum is no difference to that of another, which has more in it."""
    return sum_.startswith(_NONE) or (sum_.startswith(_EMPTY) and not other.startswith((_NONE, _EMPTY)))
