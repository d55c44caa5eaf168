"""State dictionaries as torch has them, from the names of a checkpoint: what everstep.load() returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from everstep.checkpoint.format.descriptions import is_description
from everstep.checkpoint.state import names
from everstep.checkpoint.state.aliases import share_objects
from everstep.checkpoint.state.flat import RANK
from everstep.checkpoint.state.module_states import EXTRA_STATE, build_module_state
from everstep.checkpoint.state.other_states import join_state
from everstep.checkpoint.state.param_options import PARAM_GROUPS, build_groups
from everstep.checkpoint.state.param_states import read_aliases, read_structure, sort_states
from everstep.checkpoint.state.structure import KIND, MODULE, OPTIMIZER, VALUE, build_structure

_ODD = re.compile(r"(?:^|\.)[#\[(]")


def build_objects(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dictionary, or the value, of each object from the full names of its leaves.

    Args:
        leaves: Tensors, values, and the descriptions of objects, by full name.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = leaf
    found: dict[str, Any] = {}
    for first, below in groups.items():
        if first == RANK:
            ranks: dict[int, dict[str, Any]] = {}
            for name, leaf in below.items():
                rank, _, rest = name.partition(".")
                ranks.setdefault(int(rank), {})[rest] = leaf
            found[RANK] = {rank: build_objects(each) for rank, each in sorted(ranks.items())}
        else:
            found[names.to_module(first)] = _make_state(below)
    return found


def _make_state(every: Mapping[str, Any]) -> Any:
    descriptions = {name: each for name, each in every.items() if is_description(name)}
    leaves = {name: each for name, each in every.items() if name not in descriptions}
    description = descriptions.get(KIND)
    if not leaves:
        return {}
    kind = description["is"] if description is not None else _guess_kind(leaves)
    if kind == OPTIMIZER:
        return _make_optimizer_state(leaves, descriptions)
    if kind == MODULE:
        return build_module_state(leaves, descriptions)
    return build_structure(leaves, description)


def _guess_kind(leaves: Mapping[str, Any]) -> str:
    """Guess the kind of an object that was saved by a version of everstep which did not record it."""
    if any(name.startswith("param_groups.") for name in leaves) and any(name.startswith("options.") for name in leaves):
        return OPTIMIZER
    plain = [name for name in leaves if not EXTRA_STATE.search(name)]
    is_flat = all(isinstance(leaves[name], torch.Tensor) and not _ODD.search(name) for name in plain)
    return MODULE if plain and "" not in plain and is_flat else VALUE


def _make_optimizer_state(leaves: Mapping[str, Any], descriptions: Mapping[str, Any]) -> dict[str, Any]:
    """Build the state as torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives it.

    Parameters go by their names.
    """
    state: dict[str, dict[str, Any]] = {}
    more: dict[str, Any] = {}
    start = f"{PARAM_GROUPS}."
    params = {name.removeprefix(start) for name in leaves if name.startswith(start)}
    for name, leaf in leaves.items():
        if name.startswith("state."):
            owner, below = name.removeprefix("state."), ""
            while owner not in params and owner:
                owner, _, last = owner.rpartition(".")
                below = names.join_segments(last, below)
            state.setdefault(owner, {})[below] = leaf
        elif name.startswith("more."):
            more[name.removeprefix("more.")] = leaf
    states = {param: build_structure(each, read_structure(param, [descriptions.get])) for param, each in state.items()}
    share_objects(states, read_aliases(states, [descriptions.get]))
    by_name = {names.to_module(param): states[param] for param in sort_states(states, [descriptions.get])}
    beside = build_structure(more, descriptions.get(KIND)) if more else {}
    return {**join_state(by_name, beside), "param_groups": build_groups(leaves)}
