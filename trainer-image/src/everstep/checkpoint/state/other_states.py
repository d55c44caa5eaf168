"""Tell the states of an optimizer's parameters from all else that its state_dict() holds beside the groups.

torch lets an optimizer keep state under any key, as MADGRAD keeps its count of steps under a text. A checkpoint has it
under "state" among the keys that a class adds to its state_dict(): no such key can be called that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_STATE, _GROUPS = "state", "param_groups"


def has_usual_state(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the state_dict() of an optimizer has groups and states where torch's has them.

    That of one which wraps another, as Lookahead does, may have both in dictionaries of its own.
    """
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return True
    return bool(optimizer.state_dict().keys() >= {_STATE, _GROUPS})


def split_state(
    dictionary: Mapping[str, Any], find_param: Callable[[Any], Any] = lambda key: key
) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the states of parameters, by what the groups call these, and all else but the groups.

    Args:
        dictionary: As an optimizer's state_dict() makes it.
        find_param: Returns what the groups call a parameter of which the states have this key.
    """
    params = {param for group in dictionary[_GROUPS] for param in group["params"]}
    states = dictionary.get(_STATE, {})
    others = {key: own for key, own in states.items() if find_param(key) not in params}
    more = {key: each for key, each in dictionary.items() if key not in (_STATE, _GROUPS)}
    return (
        {find_param(key): own for key, own in states.items() if key not in others},
        {**more, _STATE: others} if others else more,
    )


def join_state(states: Mapping[Any, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary of which split_state() gave both, without the groups."""
    return {**more, _STATE: {**states, **more.get(_STATE, {})}}
