"""Options of an optimizer's groups, and which parameters are in them, as values of a checkpoint, and back."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.state import names
from everstep.checkpoint.state.kinds import is_tensor
from everstep.checkpoint.values import pack

PARAM_GROUPS = "param_groups"  # of each parameter: which options it has, by their digest
PLACES = "places"  # of each parameter: which group of how many it is in, as `<parameter>.<number>-<count>`
# Of each parameter of an optimizer that was given names: its name and place, as `<parameter>.<group>-<place>`.
_PARAM_NAMES = "param_names"
_OPTIONS = "options"

_NO_OPTION = ("params", _PARAM_NAMES)


def pack_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _option(key, value) for key, value in group.items() if key not in _NO_OPTION}


def _option(key: str, value: Any) -> Any:
    if not is_tensor(value):
        return value
    if value.numel() != 1:
        raise CheckpointError(f"the option {key} of an optimizer is a tensor of {value.numel()} elements")
    return ("tensor", value.dtype, value.item())


def take_option(live: Any, saved: Any) -> Any:
    if not (isinstance(saved, tuple) and len(saved) == 3 and saved[0] == "tensor"):
        return saved
    if is_tensor(live) and live.dtype == saved[1]:
        # In place, because a captured graph reads it there.
        return live.fill_(saved[2])
    return torch.tensor(saved[2], dtype=saved[1])


def digest_options(options: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(pack(options), sort_keys=True).encode()).hexdigest()[:16]


def name_params(known: Sequence[str], group: int, given: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield names below the optimizer and values that keep the names which a group of it was given.

    Args:
        known: How the checkpoint calls the parameters of the group, in its order.
        group: Its number.
        given: What torch.optim keeps of `optimizer(model.named_parameters())`; None for an optimizer without names.
    """
    for place, (param, name) in enumerate(zip(known, given or (), strict=False)):
        # True where both are one, so that a parameter that is renamed has the new name here too.
        is_same = name == names.to_module(param)
        yield names.join(_PARAM_NAMES, param, f"{group}-{place}"), is_same or name


def build_groups(leaves: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer as a state dictionary has them, with the names of parameters as `params`.

    They are in the order of the optimizer, and so are the parameters of one that was given their names; ranks of a
    pipeline have groups of other parameters each, of which those with the same number and options are one here.

    Args:
        leaves: Values by their names below the optimizer.
    """
    params = [name.removeprefix(f"{PARAM_GROUPS}.") for name in leaves if name.startswith(f"{PARAM_GROUPS}.")]
    numbers: dict[str, set[int]] = defaultdict(set)
    given: dict[str, tuple[int, str]] = {}
    for name, said in leaves.items():
        kind, _, rest = name.partition(".")
        param, _, place = rest.rpartition(".")
        if kind == PLACES:
            numbers[param].add(int(place.partition("-")[0]))
        elif kind == _PARAM_NAMES:
            given[param] = int(place.partition("-")[2]), names.to_module(param) if said is True else str(said)
    are_placed = all(len(numbers[param]) == 1 for param in params)
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    for param in params:
        number = min(numbers[param]) if are_placed else 0
        groups[number, str(leaves[names.join(PARAM_GROUPS, param)])].append(param)
    found: list[dict[str, Any]] = []
    for (_, digest), every in sorted(groups.items(), key=lambda each: each[0][0]):
        group = dict(leaves.get(names.join(_OPTIONS, digest), {}))
        if all(param in given for param in every):
            every.sort(key=lambda param: given[param][0])
            group[_PARAM_NAMES] = [given[param][1] for param in every]
        found.append({**group, "params": [names.to_module(param) for param in every]})
    return found
