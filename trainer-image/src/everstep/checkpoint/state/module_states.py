"""The state dictionary of a module, flat as torch has it, from the names of a checkpoint."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from everstep.checkpoint.state import names
from everstep.checkpoint.state.module_metadata import find_unusual, set_metadata
from everstep.checkpoint.state.structure import KIND, build_structure

EXTRA_STATE = re.compile(r"(?:^|\.)_extra_state(?:\.|$)")
_OF_PIPELINES = frozenset({"steps", "loss_scale", "good"})  # the keys of a pipeline's own extra state
_ITEM = re.compile(r"\.(?=[#\[(])")  # before what no name within a module is: an item of a list that a module says


def build_module_state(leaves: Mapping[str, Any], descriptions: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return what the state_dict() of a module was, and of a pipeline what that of its model is.

    The extra state of a pipeline is left out: its model has none, and would not load it. A restore reads it by name.

    Args:
        leaves: By their names below the module.
        descriptions: Of the module and of what is in it, by their names below it.
    """
    nested: dict[str, dict[str, Any]] = {}  # by the key that it has in the state
    tensors: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if EXTRA_STATE.search(name):
            head, _, rest = f"{name}.".partition("_extra_state.")
            nested.setdefault(f"{head}_extra_state", {})[rest.removesuffix(".")] = leaf
        elif found := _ITEM.search(name):
            nested.setdefault(name[: found.start()], {})[name[found.end() :]] = leaf
        else:
            tensors[names.to_module(name)] = leaf
    state = OrderedDict(tensors)
    for name, each in nested.items():
        if tensors and name.endswith("_extra_state") and each.keys() == _OF_PIPELINES:
            continue
        state[names.to_module(name)] = build_structure(each, descriptions.get(names.join_segments(name, KIND)))
    if (unusual := find_unusual(descriptions)) is not None:
        set_metadata(state, unusual)
    return state
