"""State dictionaries of torch as the names of a checkpoint: the inverse of what everstep.load() returns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from everstep.checkpoint.catalog.selection import Only
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.state import names
from everstep.checkpoint.state.aliases import find_aliases
from everstep.checkpoint.state.flat import RANK
from everstep.checkpoint.state.module_metadata import read_unusual
from everstep.checkpoint.state.nesting import check_nesting
from everstep.checkpoint.state.other_states import split_state
from everstep.checkpoint.state.param_options import PARAM_GROUPS, PLACES, digest_options, name_params, pack_options
from everstep.checkpoint.state.param_states import describe_aliases, describe_states
from everstep.checkpoint.state.structure import KIND, OPTIMIZER, VALUE, describe_module, describe_structure
from everstep.checkpoint.state.ties import describe_ties

_SUFFIX = "_state_dict"

OptimizerOrder = Sequence[str] | Mapping[str, Sequence[str]]


def name_leaves(objects: Mapping[str, Any], optimizer_order: OptimizerOrder | None = None) -> dict[str, Any]:
    """Return tensors and plain values by the names under which a session saves the same objects.

    Args:
        objects: State dictionaries by object; an optimizer's with its parameters by name, by `param_names`, or by
            number where that tells which they are: in one group, which the tensors of one model fit in order.
        optimizer_order: Names of the parameters in the order in which the optimizer was given them, group after group,
            for one whose parameters have numbers; by the optimizer's name where there are several.

    Raises:
        CheckpointError: An optimizer's parameters cannot be named.
    """
    models = [each for each in objects.values() if _is_module(each)]
    orders = _collect_orders(objects, optimizer_order)
    found: dict[str, Any] = {}
    for key, state in objects.items():
        check_nesting(state, key)
        if _is_optimizer(state):
            found.update(_iterate_optimizer_leaves(names.escape_segment(key), state, models, orders.get(key)))
        else:
            found.update(_iterate_leaves(names.escape_segment(key), state))
    return found


def split_objects(loaded: Any, name: str) -> dict[str, Any]:
    """Return the objects of what torch.load() gave: its keys, `model_state_dict` as `model`; or all of it as `name`."""
    if not isinstance(loaded, Mapping) or _is_module(loaded) or _is_optimizer(loaded):
        check_object_name(name)
        return {name: loaded}
    found: dict[str, Any] = {}
    for key, each in loaded.items():
        plain = name if key == "state_dict" else str(key).removesuffix(_SUFFIX)
        check_object_name(plain)
        if plain in found:
            raise CheckpointError(f"two objects in it are called {plain!r}: rename one of them before it is imported")
        found[plain] = each
    return found


def check_object_name(name: str) -> None:
    """Refuse a name that no object can have in a checkpoint.

    Raises:
        CheckpointError: It is that under which each rank's own state is saved.
    """
    if name == RANK:
        raise CheckpointError(
            f"what is called {RANK!r} cannot be imported: each rank's own state is saved under this name; rename or "
            "remove it, or name what is wanted with only="
        )


def leave_out_unwanted(objects: Mapping[str, Any], only: Only | None) -> dict[str, Any]:
    """Return the objects without the optimizers of which nothing is wanted: their parameters need no names."""
    patterns = [only] if isinstance(only, str) else only
    return {
        key: state
        for key, state in objects.items()
        if patterns is None
        or not _is_optimizer(state)
        or any(_may_match(each, names.escape_segment(key)) for each in patterns)
    }


def find_number_keys(objects: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the dictionaries whose keys are all whole numbers as text, with their keys, by their names.

    DCP makes text of any key, and nobody can tell what they were. A module has names with dots, and what an optimizer's
    numbers are is known.
    """
    found: dict[str, list[str]] = {}

    def look(name: str, value: object) -> None:
        if not isinstance(value, Mapping):
            return
        if value and all(isinstance(key, str) and key.isdecimal() for key in value):
            found[name] = list(value)
        for key, each in value.items():
            look(f"{name}.{key}", each)

    for name, state in objects.items():
        if not _is_module(state) and not _is_optimizer(state):
            look(name, state)
    return found


def _may_match(pattern: str, prefix: str) -> bool:
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return f"{prefix}.".startswith(literal) or literal.startswith(f"{prefix}.") or pattern == prefix


def _is_module(state: Any) -> bool:
    return (
        isinstance(state, Mapping)
        and bool(state)
        and all(
            isinstance(key, str) and (isinstance(each, torch.Tensor) or _says_more(key, each))
            for key, each in state.items()
        )
    )


def _says_more(key: str, value: Any) -> bool:
    """Tell whether this is what a module may say beside its tensors: its extra state, or the list of a metric in it."""
    is_list = isinstance(value, list) and all(map(_is_tensor, value))
    return key.endswith("_extra_state") or (is_list and "." in key)


def _is_optimizer(state: Any) -> bool:
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    # DCP leaves an empty state out.
    return isinstance(groups, list) and ("state" in state or (all(map(_is_group, groups)) and bool(groups)))


def _is_group(group: object) -> bool:
    return isinstance(group, Mapping) and "params" in group and "lr" in group


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _collect_orders(objects: Mapping[str, Any], given: OptimizerOrder | None) -> Mapping[str, Sequence[str]]:
    optimizers = [key for key, state in objects.items() if _is_optimizer(state)]
    if given is None:
        return {}
    if isinstance(given, str):
        raise CheckpointError(f"optimizer_order is {given!r}: give a list of all names")
    if not isinstance(given, Mapping):
        if len(optimizers) != 1:
            raise CheckpointError(
                f"optimizer_order is one list, and the optimizers here are {optimizers}: give a dictionary of lists "
                "by their names"
            )
        return {optimizers[0]: given}
    if unknown := sorted(given.keys() - set(optimizers)):
        raise CheckpointError(f"optimizer_order has {unknown}, and the optimizers here are {optimizers}")
    return given


def _iterate_leaves(prefix: str, state: Any) -> Iterator[tuple[str, Any]]:
    if _is_module(state):
        unusual = read_unusual(state)
        if unusual is not None:
            unusual = {names.of_module(path): each for path, each in unusual.items()}
        yield from ((names.join_segments(prefix, name), each) for name, each in describe_module(unusual))
        for key, each in state.items():
            yield from names.walk_leaves(each, _is_tensor, names.join_segments(prefix, names.of_module(key)))
        tied = find_aliases({key: each for key, each in state.items() if _is_tensor(each)}).groups
        yield from describe_ties(
            [names.join_segments(prefix, names.of_module(key)) for (key,) in group] for group in tied
        )
    else:
        yield names.join_segments(prefix, KIND), describe_structure(VALUE, state, _is_tensor)
        yield from names.walk_leaves(state, _is_tensor, prefix)


def _iterate_optimizer_leaves(
    prefix: str, state: Mapping[str, Any], models: Sequence[Mapping[str, Any]], order: Sequence[str] | None
) -> Iterator[tuple[str, Any]]:
    called = _param_names(prefix, state, models, order)
    of_params, more = split_state(state, lambda key: _to_parameter_key(key, called))
    yield names.join_segments(prefix, KIND), describe_structure(OPTIMIZER, more, _is_tensor)
    yield from names.walk_leaves(more, _is_tensor, names.join_segments(prefix, "more")) if more else ()
    states = {called[param]: own for param, own in of_params.items()}
    for param, own in states.items():
        yield from names.walk_leaves(own, _is_tensor, names.join_segments(prefix, "state", param))
    described = {name: value for _, name, value in describe_states(states)} | dict(describe_aliases(prefix, states))
    yield from ((names.join_segments(prefix, name), value) for name, value in described.items())
    for number, group in enumerate(state["param_groups"]):
        options = pack_options(group)
        digest = digest_options(options)
        yield names.join_segments(prefix, "options", digest), options
        for param in group["params"]:
            yield names.join_segments(prefix, PARAM_GROUPS, called[param]), digest
            yield names.join_segments(prefix, PLACES, called[param], f"{number}-{len(state['param_groups'])}"), True
        for name, said in name_params([called[each] for each in group["params"]], number, group.get("param_names")):
            yield names.join_segments(prefix, name), said


def _to_parameter_key(param: Any, called: Collection[Any]) -> Any:
    """Return a key of a state as its groups have it: torch.distributed.checkpoint makes text of numbers."""
    return int(param) if param not in called and isinstance(param, str) and param.isdecimal() else param


def _param_names(
    prefix: str, state: Mapping[str, Any], models: Sequence[Mapping[str, Any]], order: Sequence[str] | None
) -> dict[Any, str]:
    """Return the names of an optimizer's parameters by what its state calls them.

    torch numbers parameters in the order in which the optimizer was given them. That is the model's own order for an
    optimizer of model.parameters(), and for one of several groups (with and without weight decay) hardly ever.
    """
    groups = state["param_groups"]
    params = [param for group in groups for param in group["params"]]
    if all(isinstance(param, str) for param in params):
        return {param: names.of_module(param) for param in params}
    states = {param: each for key, each in state.get("state", {}).items() for param in [_to_parameter_key(key, params)]}
    given = [name for group in groups for name in group.get("param_names", ())]
    if order is None and len(given) == len(params):
        order = given
    if order is not None:
        _check_order(prefix, order, params, states, models)
        return {param: names.of_module(name) for param, name in zip(params, order, strict=True)}
    tensors = [[name for name, each in model.items() if isinstance(each, torch.Tensor)] for model in models]
    fitting = {
        tuple(found)
        for found, model in zip(tensors, models, strict=True)
        if len(found) == len(params)
        and all(_may_belong_to(states.get(param, {}), model[name]) for param, name in zip(params, found, strict=True))
    }
    if len(groups) == 1 and len(fitting) == 1:
        return {param: names.of_module(name) for param, name in zip(params, fitting.pop(), strict=True)}
    if len(groups) > 1:
        why = f"they are in {len(groups)} groups, so their order may be another than the model's"
    elif fitting:
        why = f"{len(fitting)} models in it have tensors of their shapes"
    else:
        why = f"the model has {' and '.join(str(len(each)) for each in tensors) or 'no'} tensors"
        why += ", of other shapes" if len(params) in map(len, tensors) else ""
    raise CheckpointError(
        f"{prefix} is an optimizer whose {len(params)} parameters have numbers, and {why}: nobody can tell which is "
        "which. Give their names in the order in which the optimizer was given them, as optimizer_order=[…] or "
        "--optimizer-order FILE; or save it with names (torch.distributed.checkpoint.state_dict, or an optimizer of "
        "model.named_parameters()); or import without it: only='model.*' or --only"
    )


def _check_order(
    prefix: str,
    order: Sequence[str],
    params: Sequence[Any],
    states: Mapping[Any, Mapping[str, Any]],
    models: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse names that cannot be those of an optimizer's parameters."""
    if len(order) != len(params) or len(set(order)) != len(order):
        raise CheckpointError(
            f"{prefix} is an optimizer of {len(params)} parameters, and {len(set(order))} different names are given "
            "for them: give one for each, in the order of optimizer.param_groups"
        )
    known = {name: each for model in models for name, each in model.items() if isinstance(each, torch.Tensor)}
    for param, name in zip(params, order, strict=True):
        if models and name not in known:
            raise CheckpointError(
                f"{prefix}: no model in it has a parameter called {name}, as parameter {param} of the optimizer is "
                f"said to be; its names are as {next(iter(known))}"
            )
        if name in known and not any(
            _may_belong_to(states.get(param, {}), model[name]) for model in models if name in model
        ):
            raise CheckpointError(
                f"{prefix}: parameter {param} cannot be {name}, which has the shape {list(known[name].shape)}: its "
                "state has other shapes; give the names in the order in which the optimizer was given its parameters"
            )


def _may_belong_to(state: Mapping[str, Any], tensor: torch.Tensor) -> bool:
    """Tell whether a state may belong to a parameter: torch keeps averages of its shape, or of its rows and columns."""
    return all(
        each.dim() == tensor.dim()
        and all(one in (1, other) for one, other in zip(each.shape, tensor.shape, strict=True))
        for each in state.values()
        if isinstance(each, torch.Tensor) and each.dim() > 0
    )
