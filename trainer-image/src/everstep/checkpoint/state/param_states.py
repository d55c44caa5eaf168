"""Describe how an optimizer's states are built, and what they share: beside each parameter, whoever holds it.

This is not part of the one description of the optimizer: the ranks of a pipeline have states of different parameters.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.values import pack_value
from everstep.checkpoint.state import names
from everstep.checkpoint.state.aliases import Path, find_aliases, merge_groups, name_path
from everstep.checkpoint.state.bulk import is_leaf
from everstep.checkpoint.state.structure import KIND, describe_containers

_BUILT = "built"  # of each parameter: how its state is built, as the digest of that
_STRUCTURES = "structures"  # by their own digest, since most parameters have the same
_ALIASES = "aliases"  # of each parameter: what of its state is that of another place, too
_ORDER = "order"  # of each parameter: which one its state is, where states are not in the order of the parameters

Lookup = Callable[[str], Any]  # a value of the optimizer by its name below it; None where there is none


def describe_states(states: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield a parameter, a name below the optimizer and a value that says how the parameter's state is built.

    Args:
        states: By the names of parameters.
    """
    for param, state in states.items():
        digest, containers = _describe_state(state)
        yield param, names.join_segments(_STRUCTURES, digest, KIND), containers
        yield param, names.join_segments(_BUILT, param, KIND), digest


def describe_aliases(prefix: str, states: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names below the optimizer and values that say which states hold the same objects.

    Raises:
        CheckpointError: Something is shared that could not be given back so. Names both places.
    """
    found = find_aliases(states)
    if found.overlaps:
        one, other = found.overlaps[0]
        raise CheckpointError(
            f"{_make_state_name(prefix, states, one)} and {_make_state_name(prefix, states, other)} have elements in "
            "common and are not the same tensor (one is a view of the other, or of its memory), which no checkpoint "
            "gives back: give each its own memory (clone one of them), or keep one and make the other from it in each "
            "step"
        )
    said: dict[str, list[Any]] = {}
    for paths in found.groups:
        if len(paths[0]) == 1:
            one, other = paths[:2]
            raise CheckpointError(
                f"{_make_state_name(prefix, states, one)} and {_make_state_name(prefix, states, other)} are one "
                "dictionary, and an optimizer gets one for each parameter back: give each parameter its own "
                "dictionary, which may hold the same tensors"
            )
        label = _make_state_name("", states, paths[0])
        for place in paths:
            said.setdefault(place[0], []).append([label, list(place[1:])])
    for param, every in said.items():
        yield names.join_segments(_ALIASES, param, KIND), every


def describe_order(states: Collection[str], params: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield names below the optimizer and values that say in which order it holds the states of its parameters.

    Nothing where that is the order of the parameters: it is another one where a parameter was used later than others.

    Args:
        states: Names of the parameters that have a state, in the order of the states.
        params: Names of all parameters, in the order of the groups.
    """
    held = list(states)
    if held != [param for param in params if param in states]:
        yield from ((names.join_segments(_ORDER, param, KIND), number) for number, param in enumerate(held))


def sort_states(params: Collection[str], lookups: Collection[Lookup]) -> list[str]:
    """Return names of parameters in the order in which their states were held; as they come where nothing says so."""

    def find_number(place: int, param: str) -> int:
        said = (lookup(names.join_segments(_ORDER, param, KIND)) for lookup in lookups)
        return next((number for number in said if number is not None), place)

    numbers = {param: find_number(place, param) for place, param in enumerate(params)}
    return sorted(numbers, key=numbers.__getitem__)


@dataclass
class ParamStructure:
    """The structure of a parameter's state: how it is built, and what it shares.

    Attributes:
        built: How the state is built.
        shares: The places in it that hold one object.
        shares_with_others: Those of these places that hold one object with the state of another parameter, with the
            name of that parameter.
        number: Its number among the states, where that is not the parameter's.
    """

    built: Any = None
    shares: list[Any] = field(default_factory=list)
    shares_with_others: list[Any] = field(default_factory=list)
    number: int | None = None


def list_param_structures(described: Mapping[str, Any]) -> dict[str, ParamStructure]:
    """Return what is said of each parameter's state.

    Args:
        described: Values that the functions above gave, by their names below the optimizer.
    """
    found: dict[str, ParamStructure] = defaultdict(ParamStructure)
    holders: dict[str, set[str]] = defaultdict(set)  # of each shared object
    aliases: dict[str, dict[str, list[Any]]] = {}
    for name, value in described.items():
        kind, _, param = name.removesuffix(f".{KIND}").partition(".")
        if kind == _BUILT:
            found[param].built = described.get(names.join_segments(_STRUCTURES, str(value), KIND), {})
        elif kind == _ORDER:
            found[param].number = value
        elif kind == _ALIASES:
            aliases[param] = defaultdict(list)
            for label, path in value:
                holders[label].add(param)
                aliases[param][label].append(path)
    for param, groups in aliases.items():
        found[param].shares = [paths for paths in groups.values() if len(paths) > 1]
        found[param].shares_with_others = [[label, paths] for label, paths in groups.items() if len(holders[label]) > 1]
    return dict(found)


def read_structure(param: str, lookups: Collection[Lookup]) -> dict[str, Any] | None:
    """Return how a parameter's state is built, for build_structure(); None where an older checkpoint does not say.

    Args:
        param: Its name.
        lookups: What is this rank's own first.
    """
    digests = (lookup(names.join_segments(_BUILT, param, KIND)) for lookup in lookups)
    digest = next((each for each in digests if each is not None), None)
    if digest is None:
        return None
    found = (lookup(names.join_segments(_STRUCTURES, digest, KIND)) for lookup in lookups)
    return {"containers": next((each for each in found if each is not None), {})}


def read_aliases(params: Collection[str], lookups: Collection[Lookup]) -> list[list[Path]]:
    """Return the paths, beginning with a parameter's name, at which states held one object, in groups."""
    return merge_groups(
        ((param, *path), label)
        for param in params
        for lookup in lookups
        for label, path in lookup(names.join_segments(_ALIASES, param, KIND)) or ()
    )


def _make_state_name(prefix: str, states: Mapping[str, Any], path: Path) -> str:
    return names.join_segments(prefix, "state", path[0], name_path(states[path[0]], path[1:]))


def _describe_state(state: Any) -> tuple[str, dict[str, Any]]:
    if type(state) is dict and not any(isinstance(each, dict | list | tuple) for each in state.values()):
        keys = tuple(state)
        if all(type(key) is str for key in keys):
            return _describe_flat(keys)
    containers = describe_containers(state, is_leaf)
    return _digest_containers(containers), containers


@functools.lru_cache(maxsize=1024)
def _describe_flat(keys: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    pieces = list(map(names.escape_segment, keys))
    containers = {"": {"order": pieces}} if pieces != sorted(pieces) else {}
    return _digest_containers(containers), containers


def _digest_containers(containers: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(pack_value(dict(containers)), sort_keys=True).encode()).hexdigest()[:16]
