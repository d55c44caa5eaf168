"""Sum up what ranks with the same leaves must agree about beside values: how objects are built, and what they share.

A checkpoint says it once for all ranks. Where one rank holds one tensor under two names and another rank two, or
dictionaries in other orders, the first rank's description would be taken for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from everstep.checkpoint.format.descriptions import BUILT_AMONG, KIND, is_description, object_of
from everstep.checkpoint.format.lines import as_text
from everstep.checkpoint.format.values import unpack_value
from everstep.checkpoint.state.flat import Flat, get_local_tensor
from everstep.checkpoint.state.param_states import ParamStructure, list_param_structures
from everstep.checkpoint.state.structure import MODULE, OPTIMIZER

_LONGEST = 120  # characters of a structure that is told as it is
_COMPARED = ("containers", "aliases")  # of a description

Statement = tuple[str, Any, str]  # a name, what is said of it, and a sum of the leaves that it depends on


def describe_structures(flat: Flat, own: str) -> dict[str, str]:
    """Return how each object, or each parameter's state, is built and what it shares, in words.

    Ranks that hold other leaves, or no element of some, cannot say the same: each name ends with a sum of the leaves on
    which the words depend, and only what has equal names is compared.

    Args:
        flat: The state of a rank.
        own: The beginning of names of what is this rank's own, which is not compared.
    """
    leaves: dict[str, list[str]] = defaultdict(list)
    described: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in flat.values.items():
        if name.startswith(own):
            continue
        if is_description(name):
            described[object_of(name)][name] = value
        elif name not in flat.tensors:
            leaves[object_of(name)].append(name)
    for name, tensor in flat.tensors.items():
        if not name.startswith(own):
            is_empty = tensor.numel() > 0 and get_local_tensor(tensor).numel() == 0
            leaves[object_of(name)].append(f"{name}%" if is_empty else name)
    for name in flat.left_out:  # rank 0 saves these alone, and says how they are built
        leaves[object_of(name)].append(f"{name}%elsewhere")
    found = {}
    for each, values in described.items():
        for name, structure, among in _list_structures(each, values, leaves[each]):
            found[f"{name}{BUILT_AMONG}{among}"] = _shorten_structure(structure)
    return found


def _list_structures(each: str, values: Mapping[str, Any], leaves: Sequence[str]) -> Iterator[Statement]:
    unpacked = {name.removeprefix(f"{each}."): unpack_value(value, name) for name, value in values.items()}
    described = unpacked.pop(KIND, {})
    kind = described.get("is")
    if kind == MODULE:
        # A module whose extra state has nothing to tell says nothing of it: all is told at once.
        if any("_extra_state" in name for name in leaves):
            structures = {name.removesuffix(f".{KIND}"): _structure_of(value) for name, value in unpacked.items()}
            yield each, {name: structure for name, structure in structures.items() if structure}, _sum_up(leaves)
        return
    if kind == OPTIMIZER:
        yield from _list_states(f"{each}.state.", list_param_structures(unpacked), leaves)
    yield each, _structure_of(described), _sum_up(leaves)


def _list_states(prefix: str, params: Mapping[str, ParamStructure], leaves: Sequence[str]) -> Iterator[Statement]:
    """Yield what is said of each parameter's state, with as few leaves as it depends on: others may be empty here."""
    below: dict[str, list[str]] = defaultdict(list)
    for name in leaves:
        owner = name.removeprefix(prefix) if name.startswith(prefix) else ""
        while owner and owner not in params:
            owner = owner.rpartition(".")[0]
        below[owner].append(name)
    with_marks, without = _sum_up(leaves), _sum_up(f"{name.removesuffix('%')}%order" for name in leaves)
    for param, said in params.items():
        yield f"{prefix}{param}", {"built": said.built, "shares": said.shares}, _sum_up(below[param])
        yield f"{prefix}{param}", {"number": said.number}, without
        yield f"{prefix}{param}", {"shares with others": said.shares_with_others}, with_marks


def _sum_up(leaves: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(sorted(leaves)).encode("utf-8", "surrogatepass"))


def _structure_of(description: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in description.items() if key in _COMPARED}


def _shorten_structure(structure: Any) -> str:
    text = as_text(structure)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}… (checksum {xxhash.xxh3_64_hexdigest(text.encode())})"
