"""Options of an optimizer's groups, and which parameters are in them, as values of a checkpoint, and back."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.values import pack_value
from everstep.checkpoint.state import names
from everstep.checkpoint.state.kinds import is_tensor

PARAM_GROUPS = "param_groups"  # of each parameter: which options it has, by their digest
PLACES = "places"  # of each parameter: which group of how many it is in, as `<parameter>.<number>-<count>`
# Of each parameter of an optimizer that was given no names: its place, as `<parameter>.<group>-<place>`.
POSITIONS = "positions"
# Of each parameter of an optimizer that was given names: its name and place, as `<parameter>.<group>-<place>`.
PARAM_NAMES = "param_names"
_OPTIONS = "options"
_TENSOR = "tensor"  # stands for one, with its type, its one element, and its shape where it has dimensions

_NO_OPTION = ("params", PARAM_NAMES)


def pack_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group as a checkpoint has them: with what stands for tensors."""
    return {key: _pack_option(key, value) for key, value in group.items() if key not in _NO_OPTION}


def _pack_option(key: str, value: Any) -> Any:
    if type(value) in (tuple, list):  # as the betas of Adam
        return type(value)(_pack_option(key, each) for each in value)
    if not is_tensor(value):
        return value
    if value.numel() != 1:
        raise CheckpointError(
            f"the option {key} of an optimizer is a tensor of {value.numel()} elements, and one of a single element "
            "can be saved: keep the others outside of its param_groups"
        )
    found = (_TENSOR, value.dtype, value.item())
    return (*found, tuple(value.shape)) if value.dim() else found


def unpack_option(packed: Any, live: Any = None, taken: dict[int, Any] | None = None) -> Any:
    """Return an option as it was saved.

    Args:
        packed: As pack_options() made it.
        live: What the optimizer has: a tensor of the same type and shape takes the value, because a captured graph, or
            the script, reads it there.
        taken: By identity, the tensors that took a value already, and that: of several groups that share one tensor,
            those that were saved with another value get a tensor of their own.
    """
    if _stands_for_tensor(packed):
        dtype, value, *rest = packed[1:]
        shape = tuple(rest[0]) if rest else ()
        fits = is_tensor(live) and (live.dtype, tuple(live.shape)) == (dtype, shape)
        if fits and (taken is None or taken.setdefault(id(live), value) == value):
            return live.fill_(value)
        device = live.device if is_tensor(live) else "cpu"
        return torch.full(shape, value, dtype=dtype, device=device)
    if type(packed) in (tuple, list):
        fits = type(live) in (tuple, list) and len(live) == len(packed)
        every = live if fits else [None] * len(packed)
        return type(packed)(unpack_option(each, own, taken) for each, own in zip(packed, every, strict=True))
    return packed


def holds_tensor(option: Any) -> bool:
    """Tell whether an option is a tensor or has one in it."""
    return is_tensor(option) or (type(option) in (tuple, list) and any(map(holds_tensor, option)))


def _stands_for_tensor(packed: Any) -> bool:
    return (
        type(packed) is tuple and len(packed) in (3, 4) and packed[0] == _TENSOR and isinstance(packed[1], torch.dtype)
    )


def digest_options(options: dict[str, Any]) -> str:
    """Return the name under which the options of a group are saved, also of those that need a pickle."""
    try:
        packed = pack_value(options, allow_pickle=True)
    except Exception:  # they have none: where they are saved, it is said of which this is
        packed = list(options)
    return hashlib.sha256(json.dumps(packed, sort_keys=True).encode()).hexdigest()[:16]


def find_options_of_places(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digest of the options that each group had when saved, by its place as `<number>-<count>`.

    A rank that has no parameter of a group, as one stage of a pipeline has no embedding, finds its options here: a
    scheduler on that rank goes on from them, and its numbers are compared with those of the others. A place at which
    ranks had groups with different options is left out.

    Args:
        values: Of a checkpoint, by their names below the optimizer.
    """
    found: dict[str, set[Any]] = defaultdict(set)
    for name in values:
        kind, _, rest = name.partition(".")
        if kind == PLACES:
            param, _, place = rest.rpartition(".")
            found[place].add(values.get(names.join_segments(PARAM_GROUPS, param)))
    return {place: next(iter(each)) for place, each in found.items() if len(each) == 1}


def name_params(known: Sequence[str], group: int, given: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield names below the optimizer and values that keep the order of a group, and the names that it was given.

    In the name, because ranks that share a parameter may have others beside it.

    Args:
        known: How the checkpoint calls the parameters of the group, in its order.
        group: Its number.
        given: What torch.optim keeps of `optimizer(model.named_parameters())`; None for an optimizer without names.
    """
    if given is None:
        yield from (
            (names.join_segments(POSITIONS, param, f"{group}-{place}"), True) for place, param in enumerate(known)
        )
    for place, (param, name) in enumerate(zip(known, given or (), strict=False)):
        # True where both are one, so that a parameter that is renamed has the new name here too.
        is_same = name == names.to_module(param)
        yield names.join_segments(PARAM_NAMES, param, f"{group}-{place}"), is_same or name


def build_groups(leaves: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer as a state dictionary has them, with the names of parameters as `params`.

    They are in the order of the optimizer, and so are their parameters: torch's own load_state_dict() knows them by
    that. Ranks of a pipeline have groups of other parameters each, of which those with the same number and options are
    one here, in the order of names, as those of checkpoints of earlier versions.

    Args:
        leaves: Values by their names below the optimizer.
    """
    params = [name.removeprefix(f"{PARAM_GROUPS}.") for name in leaves if name.startswith(f"{PARAM_GROUPS}.")]
    numbers: dict[str, set[int]] = defaultdict(set)
    given: dict[str, tuple[int, str]] = {}
    positions: dict[str, int] = {}
    for name, said in leaves.items():
        kind, _, rest = name.partition(".")
        param, _, place = rest.rpartition(".")
        if kind == PLACES:
            numbers[param].add(int(place.partition("-")[0]))
        elif kind == PARAM_NAMES:
            given[param] = int(place.partition("-")[2]), names.to_module(param) if said is True else str(said)
        elif kind == POSITIONS:
            positions[param] = int(place.partition("-")[2])
    are_placed = all(len(numbers[param]) == 1 for param in params)
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    for param in params:
        number = min(numbers[param]) if are_placed else 0
        groups[number, str(leaves[names.join_segments(PARAM_GROUPS, param)])].append(param)
    found: list[dict[str, Any]] = []
    for (_, digest), every in sorted(groups.items(), key=lambda each: each[0][0]):
        packed: Mapping[str, Any] = leaves.get(names.join_segments(_OPTIONS, digest), {})
        group = {key: unpack_option(each) for key, each in packed.items()}
        if all(param in given for param in every):
            every.sort(key=lambda param: given[param][0])
            group[PARAM_NAMES] = [given[param][1] for param in every]
        elif sorted(positions.get(param, -1) for param in every) == list(range(len(every))):
            every.sort(key=positions.__getitem__)
        found.append({**group, "params": [names.to_module(param) for param in every]})
    return found
