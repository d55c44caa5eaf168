"""State dictionaries of torch as the names of a checkpoint: the inverse of what everstep.load() returns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.state import names
from everstep.checkpoint.state.flat import RANK
from everstep.checkpoint.values import pack

_SUFFIX = "_state_dict"


def name_leaves(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors and plain values by the names under which a session saves the same objects.

    Args:
        objects: State dictionaries by object; an optimizer's with its parameters by name, by `param_names`, or by
            number where the tensors of the model fit them in order.

    Raises:
        CheckpointError: An optimizer's parameters cannot be named.
    """
    model: Mapping[str, Any] = next((each for each in objects.values() if _is_module(each)), {})
    found: dict[str, Any] = {}
    for key, state in objects.items():
        for name, leaf in _leaves(names.segment(key), state, model):
            found[name] = leaf
    return found


def split_objects(loaded: Any, name: str) -> dict[str, Any]:
    """Return the objects of what torch.load() gave: its keys, `model_state_dict` as `model`; or all of it as `name`."""
    if not isinstance(loaded, Mapping) or _is_module(loaded) or _is_optimizer(loaded):
        return {name: loaded}
    found: dict[str, Any] = {}
    for key, each in loaded.items():
        plain = name if key == "state_dict" else str(key).removesuffix(_SUFFIX)
        if plain == RANK:
            raise CheckpointError(
                f"what is called {RANK!r} in it cannot be imported: each rank's own state is saved under this name; "
                "rename or remove it, or name what is wanted with only="
            )
        if plain in found:
            raise CheckpointError(f"two objects in it are called {plain!r}: rename one of them before it is imported")
        found[plain] = each
    return found


def _is_module(state: Any) -> bool:
    return (
        isinstance(state, Mapping)
        and bool(state)
        and all(
            isinstance(key, str) and (isinstance(each, torch.Tensor) or key.endswith("_extra_state"))
            for key, each in state.items()
        )
    )


def _is_optimizer(state: Any) -> bool:
    return isinstance(state, Mapping) and isinstance(state.get("param_groups"), list) and "state" in state


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _leaves(prefix: str, state: Any, model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if _is_module(state):
        for key, each in state.items():
            yield from names.walk(each, _is_tensor, names.join(prefix, names.of_module(key)))
    elif _is_optimizer(state):
        yield from _optimizer(prefix, state, model)
    else:
        yield from names.walk(state, _is_tensor, prefix)


def _optimizer(prefix: str, state: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    called = _param_names(prefix, state, model)
    for param, own in state["state"].items():
        yield from names.walk(own, _is_tensor, names.join(prefix, "state", called[param]))
    for group in state["param_groups"]:
        options = {key: each for key, each in group.items() if key not in ("params", "param_names")}
        options = {
            key: ("tensor", each.dtype, each.item()) if isinstance(each, torch.Tensor) else each
            for key, each in options.items()
        }
        digest = hashlib.sha256(json.dumps(pack(options), sort_keys=True).encode()).hexdigest()[:16]
        yield names.join(prefix, "options", digest), options
        for param in group["params"]:
            yield names.join(prefix, "param_groups", called[param]), digest


def _param_names(prefix: str, state: Mapping[str, Any], model: Mapping[str, Any]) -> dict[Any, str]:
    params = [param for group in state["param_groups"] for param in group["params"]]
    given = [name for group in state["param_groups"] for name in group.get("param_names", ())]
    if all(isinstance(param, str) for param in params):
        return {param: names.of_module(param) for param in params}
    if len(given) == len(params):
        return {param: names.of_module(name) for param, name in zip(params, given, strict=True)}
    tensors = [(name, each) for name, each in model.items() if isinstance(each, torch.Tensor)]
    if len(tensors) == len(params) and all(
        _fits(state["state"].get(param, {}), tensor) for param, (_, tensor) in zip(params, tensors, strict=True)
    ):
        return {param: names.of_module(name) for param, (name, _) in zip(params, tensors, strict=True)}
    raise CheckpointError(
        f"{prefix} is an optimizer whose {len(params)} parameters have numbers, and the model has {len(tensors)} "
        "tensors: nobody can tell which is which. Save it with names (torch.distributed.checkpoint.state_dict), or "
        f"import without it: only='model.*' or --only"
    )


def _fits(state: Mapping[str, Any], tensor: torch.Tensor) -> bool:
    return all(
        each.shape == tensor.shape for each in state.values() if isinstance(each, torch.Tensor) and each.dim() > 0
    )
