"""Find which of a model's results each parameter is behind: where a loss leaves these out, it has no gradient."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.microbatch import batch_size
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.engine.result_uses import list_edges
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.autocast import casting_to
from everstep.pipeline.frontend.check import as_before
from everstep.pipeline.frontend.compiled import is_compiled
from everstep.pipeline.frontend.record import Call
from everstep.pipeline.frontend.refs import iterate_references
from everstep.pipeline.frontend.script_draws import ScriptDraws
from everstep.pipeline.frontend.trace import Traced, attributes_kept
from everstep.pipeline.frontend.tree import Tree

_log = logging.getLogger("everstep.pipeline")

_SAMPLES = 2


def find_parameters_behind_results(
    model: nn.Module,
    found: Traced | Tree,
    inputs: Mapping[str, Any],
    unsplit_inputs: Collection[str],
    autocast: torch.dtype | None,
) -> dict[str, tuple[int, ...]]:
    """Return the parameters that are behind some of the results that learn, and not behind all of them.

    Args:
        model: With its weights; nothing is known of it where it has none here.
        found: The same, as it can be cut.
        inputs: The example by the names of arguments.
        unsplit_inputs: Arguments without samples.
        autocast: The type to which steps cast.

    Returns:
        By the name of the parameter, the numbers of these results, in the order of the tensors of what the model gives.
    """
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(inputs))]
    samples = batch_size(dict(inputs), frozenset(unsplit_inputs))
    if any(each.device.type == "meta" for each in tensors) or not samples or isinstance(found, Tree):
        return {}
    if _count_values(found.record.root) < 2:
        return {}
    if any(is_compiled(call.module) and _count_values(call) != 1 for call in found.record.root.all_calls()):
        return {}  # compiled code gives zeros for all that it was given, whichever of its results is used
    device, draws = tensors[0].device, ScriptDraws(model)

    def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_cut = name not in unsplit_inputs and tensor.dim() and len(tensor) == samples
        return (tensor[:_SAMPLES] if is_cut else tensor).to(device, copy=True)

    try:
        with (
            as_before(model),
            attributes_kept(model),
            draws.at(draws.get_state()),
            torch.enable_grad(),
            casting_to(autocast, device.type),
        ):
            given = {name: map_tensors(each, partial(take, name)) for name, each in inputs.items()}
            results = list_edges(Arguments(model).call(model, given))
    except Exception as error:
        _log.info("which results parameters are behind is not known: %s: %s", type(error).__name__, error)
        return {}
    behind: dict[str, list[int]] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, edge in enumerate(results):
        for parameter in _list_parameters(edge):
            if parameter in names:
                behind.setdefault(names[parameter], []).append(number)
    learning = sum(edge is not None for edge in results)
    return {name: tuple(numbers) for name, numbers in behind.items() if len(numbers) < learning}


def _count_values(call: Call) -> int:
    return sum(1 for _ in iterate_references(call.outputs))


def _list_parameters(edge: Any) -> list[Any]:
    """Return the leaves in the graph of a result."""
    waiting, seen, leaves = [] if edge is None else [edge[0]], set[Any](), []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [each for each, _ in node.next_functions if each is not None]
    return leaves
