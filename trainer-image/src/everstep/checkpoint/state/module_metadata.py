"""Save the versions of modules, which a state_dict() of torch keeps beside their tensors, in its attribute `_metadata`.

From them load_state_dict() knows whether a module has to bring an older state up to date. Without them, it takes any
state for one that is older than all versions. Nearly all modules are of version 1, of which nothing is saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from everstep.checkpoint.format.descriptions import KIND
from everstep.checkpoint.state import names

IS_SAID, METADATA = "versioned", "metadata"  # in the description of an object, of a module in it, of a dictionary

# Hooks that make parameters sharded ones again, whatever is loaded.
_SHARDING = "torch.distributed."
_ATTRIBUTE = "_metadata"
_USUAL = {"version": 1}
# How one call of load_state_dict() was made, not what the state is.
_OF_A_CALL = ("assign_to_params_buffers",)
_SCALARS = (type(None), bool, int, float, str)


def read_unusual(state: object) -> dict[str, dict[str, Any]] | None:
    """Return what is said of modules that are not of version 1, by their paths; None where nothing is said of any.

    Args:
        state: A state dictionary. What a hook of the script says is kept if it is a scalar.
    """
    said = getattr(state, _ATTRIBUTE, None)
    if not isinstance(said, Mapping):
        return None
    found = {str(path): _keep_versions(each) for path, each in said.items() if isinstance(each, Mapping)}
    return {path: each for path, each in found.items() if each != _USUAL}


def find_unusual(descriptions: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]] | None:
    """Return what a checkpoint says of a module's modules that are not of version 1, by their paths.

    Args:
        descriptions: Of the object and of what is in it, by their names below the object.

    Returns:
        None where the checkpoint does not say it: it is older, or was imported from what does not say it.
    """
    if not descriptions.get(KIND, {}).get(IS_SAID):
        return None
    return {
        names.to_module(name.removesuffix(KIND).removesuffix(".")): each[METADATA]
        for name, each in descriptions.items()
        if METADATA in each
    }


def set_metadata(state: OrderedDict[str, Any], unusual: Mapping[str, Mapping[str, Any]]) -> None:
    """Say of a state dictionary what read_unusual() gave, and of all other modules that have something in it that they
    are of version 1."""
    usual = {path: dict(_USUAL) for path in _list_module_paths(state)}
    setattr(state, _ATTRIBUTE, OrderedDict(usual | {path: dict(each) for path, each in unusual.items()}))


def set_metadata_as_here(
    state: OrderedDict[str, Any],
    here: object,
    saved: Mapping[str, Mapping[str, Any]] | None,
    plain: Callable[[str], str],
) -> None:
    """Say of a state dictionary that is given to a module of which version it is.

    Args:
        state: By the module's own keys.
        here: The module's own state dictionary.
        saved: By plain paths, of modules that are not of version 1; None: a checkpoint that does not say it, and is
            taken for one of the module as it is.
        plain: A path as it is called without the wrappers.
    """
    own = getattr(here, _ATTRIBUTE, None)
    if not isinstance(own, Mapping):
        return
    found = {path: dict(each) if saved is None else dict(saved.get(plain(path), _USUAL)) for path, each in own.items()}
    setattr(state, _ATTRIBUTE, OrderedDict(found))


def find_own_loading(module: nn.Module) -> Iterator[str]:
    """Yield the paths of modules that take a state in by code of their own, which may change it on its way."""
    for path, each in module.named_modules():
        kind = type(each)
        has_method = (
            kind._load_from_state_dict not in (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
            or kind.load_state_dict is not nn.Module.load_state_dict
        )
        hooks = [getattr(hook, "hook", hook) for hook in each._load_state_dict_pre_hooks.values()]
        if has_method or any(not str(getattr(hook, "__module__", "")).startswith(_SHARDING) for hook in hooks):
            yield path


def _keep_versions(said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in said.items() if key not in _OF_A_CALL and isinstance(each, _SCALARS)}


def _list_module_paths(keys: Iterable[object]) -> Collection[str]:
    """Return the paths of the modules that keys of a state dictionary belong to, and of those around them."""
    found = {"": None}
    for key in keys:
        path = str(key)
        while "." in path:
            path = path.rpartition(".")[0]
            if path in found:
                break
            found[path] = None
    return found.keys()
