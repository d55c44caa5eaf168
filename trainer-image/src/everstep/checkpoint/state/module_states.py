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


def build_module_state(leaves: Mapping[str, Any], descriptions: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return what the state_dict() of a module was.

    Args:
        leaves: By their names below the module.
        descriptions: Of the module and of what is in it, by their names below it.
    """
    extra = {name for name in leaves if EXTRA_STATE.search(name)}
    tensors = {names.to_module(name): leaf for name, leaf in leaves.items() if name not in extra}
    state = OrderedDict(tensors | _build_extra_states(leaves, extra, descriptions))
    if (unusual := find_unusual(descriptions)) is not None:
        set_metadata(state, unusual)
    return state


def _build_extra_states(leaves: Mapping[str, Any], extra: set[str], descriptions: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for name in extra:
        head, _, rest = f"{name}.".partition("_extra_state.")
        found.setdefault(f"{head}_extra_state", {})[rest.removesuffix(".")] = leaves[name]
    return {
        names.to_module(name): build_structure(each, descriptions.get(names.join_segments(name, KIND)))
        for name, each in found.items()
    }
