"""The models of `models` cut by the front end, evenly, whatever they are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from everstep.pipeline.frontend import StageModule, Traced, placement, split_model, trace_model
from everstep.pipeline.graph import StageGraph, stage_graph
from tests.pipeline.compiled import COMPILED
from tests.pipeline.models import Case


def cut(case: Case, stages: int, dtype: torch.dtype, copy_number: int) -> tuple[list[StageModule], StageGraph]:
    """About as many nodes in each stage. The stages of another `copy_number` have weights of their own.

    A model is traced once, and its copies are used again, with weights as built: one engine at a time.
    """
    found = _copy(case, dtype, copy_number)
    _as_built(case, dtype, found.model)
    stage_of = placement.complete_placement(found.graph, even(found, stages))
    return split_model(found, stage_of), stage_graph(found.graph, stage_of)


def even(traced: Traced, stages: int) -> dict[str, int]:
    """The stage of each node: `stages` runs of them, about as many in each, with what belongs together in one."""
    names = [node.name for node in traced.graph.nodes]
    cuts = _between(traced)
    starts = [cuts[len(cuts) * index // stages] for index in range(1, stages)]
    return {name: sum(start <= index for start in starts) for index, name in enumerate(names)}


def _between(traced: Traced) -> Sequence[int]:
    """Before which nodes a stage can begin."""
    spans: dict[str, tuple[int, int]] = {}
    for index, node in enumerate(traced.graph.nodes):
        if node.colocate:
            spans[node.colocate] = spans.get(node.colocate, (index, index))[0], index
    nodes = range(1, len(traced.graph.nodes))
    return [index for index in nodes if not any(first < index <= last for first, last in spans.values())]


@cache
def traced(case: Case, dtype: torch.dtype = torch.float64) -> Traced:
    """Traced once, in training: whoever changes more of its model than weights gives it back as it was."""
    return trace_model(case.build(dtype=dtype), case.example(dtype=dtype).inputs)


@cache
def _copy(case: Case, dtype: torch.dtype, number: int) -> Traced:
    if number and case.name in COMPILED:  # a copy would not be
        return trace_model(case.build(dtype=dtype), case.example(dtype=dtype).inputs)
    return copy.deepcopy(traced(case, dtype)) if number else traced(case, dtype)


def _as_built(case: Case, dtype: torch.dtype, model: Any) -> None:
    fresh = case.build(dtype=dtype)
    with torch.no_grad():
        for mine, theirs in ((model.parameters(), fresh.parameters()), (model.buffers(), fresh.buffers())):
            for tensor, other in zip(mine, theirs, strict=True):
                tensor.copy_(other)
    model.requires_grad_(True)
    for parameter in model.parameters():
        parameter.grad = None
