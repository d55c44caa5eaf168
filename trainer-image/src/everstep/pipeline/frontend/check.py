"""Check that stages compute what the model they were cut from computes: one micro-batch through both, before
training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.compiled import disable_compilation
from everstep.pipeline.frontend.gradients import without_hooks
from everstep.pipeline.frontend.patches import divisible_checkpoints
from everstep.pipeline.frontend.script_draws import ScriptDraws
from everstep.pipeline.frontend.stages import INPUT, OUTPUT, StageModule
from everstep.pipeline.frontend.trace import attributes_kept

Loss = Callable[[Any], Any]  # of the model's output; a scalar
_FACTOR = 1024.0  # a power of two, which rounds nothing


def run_stages(stages: Sequence[StageModule], inputs: Mapping[str, Any], *, detached: bool = False) -> Any:
    """The model's output by its stages, one after the other in this process. `detached`: without autograd between them,
    as ranks are; then each stage's own inputs are leaves."""
    values = {INPUT + name: value for name, value in inputs.items()}
    for stage in stages:
        given = {name: values[name] for name in stage.inputs}
        values |= stage({name: _make_leaf(value) for name, value in given.items()} if detached else given)
    return values[OUTPUT]


def compare_gradients(
    model: nn.Module,
    stages: Sequence[StageModule],
    inputs: Mapping[str, Any],
    loss: Loss,
    *,
    tolerance: float = 1e-4,
    has_hooks: bool = False,
) -> float:
    """The largest difference of a gradient to that of the unsplit model, relative to the largest gradient of its
    parameter, or to a thousandth of the largest of all, since some gradients are nothing but rounding. Both draw the
    same random numbers. Neither weights, nor gradients, nor statistics change.

    PipelineError if it is above `tolerance`, with the name of the parameter: something in the model crosses from stage
    to stage in a way that is not a value. Also if the gradient of a larger loss is not larger by as much, which is
    looked at where functions written in Python, or with `has_hooks`, are in the graph.
    """
    parameters = dict(model.named_parameters())
    functions: list[str] = []
    call = partial(Arguments(model).call, model)
    draws = ScriptDraws(model)
    drawn = draws.get_state()

    def given() -> Any:  # copies, since a model may change in place what it is given
        return pytree.tree_map(_copy_leaf, dict(inputs))

    def again(forward: Callable[[Any], Any], factor: float = 1.0) -> dict[str, Any]:
        with as_before(model), attributes_kept(model), divisible_checkpoints(), draws.at(drawn):
            with torch.no_grad():
                forward(given())  # who counts calls does something else in the second
            return _compute_gradients(parameters, lambda: loss(forward(given())) * factor, functions)

    expected, found = again(call), again(partial(run_stages, stages))
    if functions or has_hooks:
        _refuse_other_slopes(expected, again(call, _FACTOR), dict.fromkeys(functions), tolerance)
    worst, where = 0.0, ""
    largest = max((_largest(each) for each in expected.values() if each is not None and each.numel()), default=0.0)
    for name, wanted in expected.items():
        if (wanted is None) != (found[name] is None):
            raise PipelineError(f"{name} has {'no' if wanted is not None else 'a'} gradient once the model is cut")
        if wanted is not None and wanted.numel():
            scale = max(_largest(wanted), largest / 1000) or 1.0
            # Where the model's own gradient is no number, as of a row of attention with nothing in it, so is the other.
            same = (found[name] == wanted) | (found[name].isnan() & wanted.isnan())
            difference = float((found[name] - wanted).abs().masked_fill(same, 0.0).max()) / scale
            if not difference <= worst:
                worst, where = difference, name
    if not worst <= tolerance:
        raise PipelineError(
            f"the gradient of {where} differs by {worst:.1e} from the unsplit model's: its code passes a "
            "value on that is neither an argument nor a result; place the modules that share it in one stage; or it "
            "does what no trace sees, as to seed a generator or to ask for type(x)"
        )
    return worst


def _largest(tensor: Any) -> float:
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _refuse_other_slopes(
    expected: Mapping[str, Any], larger: Mapping[str, Any], functions: Collection[str], tolerance: float
) -> None:
    """PipelineError if a backward does not do the same to a gradient of any size.

    Backwards in a pipeline begin with sums of losses, which become those of a mean when all are there.
    """
    for name, one in expected.items():
        other = larger[name]
        if one is None or other is None or not one.numel() or not bool(other.isfinite().all()):
            continue
        scale = max(float(one.abs().max()), float(other.abs().max()) / _FACTOR)
        if float((other / _FACTOR - one).abs().max()) > tolerance * scale:
            where = f"one of {', '.join(functions)}, or a hook" if functions else "a hook"
            raise PipelineError(
                f"the gradient of {name} of a loss that is {_FACTOR:g} times as large is not {_FACTOR:g} times as "
                f"large: something in the backward ({where}) changes gradients by their size, as by clamping or "
                "normalising them, and would do something else in a pipeline, where backward begins with sums of "
                "losses and not with their mean: clip with EngineOptions.clip or run.clip_grad_norm_, change gradients "
                "in hooks on parameters, which get those of the mean; PlanOptions(check=False) trains it as it is"
            )


def find_mixing_nodes(nodes: Mapping[str, StageModule], inputs: Mapping[str, Any], model: nn.Module) -> list[str]:
    """The nodes in which the samples of a batch meet each other, so that a micro-batch is not a part of a batch: found
    by giving each, in evaluation mode, its inputs at once and in two halves. Batch statistics are not among them, since
    evaluation takes those that were learnt.

    PipelineError if the batch has fewer than two samples.
    """
    leaves = pytree.tree_leaves(dict(inputs))
    samples = next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
    if samples < 2:
        raise PipelineError("find_mixing_nodes() needs a batch of two samples or more")
    halves = slice(0, samples // 2), slice(samples // 2, None)
    flags = {module: module.training for module in model.modules()}
    found: list[str] = []
    try:
        with as_before(model), torch.no_grad():
            values = {INPUT + name: value for name, value in inputs.items()}
            for name, node in nodes.items():
                for each in node.module.modules():  # not by `eval`: one of a model's own may do more
                    each.training = False
                # Copies, since a node may change in place what it is given.
                given = {key: pytree.tree_map(_copy_leaf, values[key]) for key in node.inputs}
                parts = [
                    {key: pytree.tree_map(_copy_leaf, _select_rows(given[key], samples, cut)) for key in given}
                    for cut in halves
                ]
                made = node(given)
                for part, cut in zip(parts, halves, strict=True):
                    result = node(part)
                    if name not in found and not all(
                        _are_close(_select_rows(made[key], samples, cut), result[key]) for key in made
                    ):
                        found.append(name)
                values |= made
    finally:
        for module, flag in flags.items():
            module.training = flag
    return found


def _copy_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _select_rows(value: Any, samples: int, cut: slice) -> Any:
    def rows(leaf: Any) -> Any:
        return leaf[cut] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == samples else leaf

    return pytree.tree_map(rows, value)


def _are_close(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(
        not isinstance(a, torch.Tensor)
        or (a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5, equal_nan=True))
        for a, b in pairs
    )


def _make_leaf(value: Any) -> Any:
    def leaf(item: Any) -> Any:
        return item.detach().requires_grad_(item.requires_grad) if isinstance(item, torch.Tensor) else item

    return pytree.tree_map(leaf, value)


def _compute_gradients(parameters: Mapping[str, Any], run: Callable[[], Any], functions: list[str]) -> dict[str, Any]:
    """The gradients of the learning parameters; the names of Python's functions in the graph go to `functions`."""
    learning = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    with torch.enable_grad():
        total = run()
        functions += _list_python_functions(total)
        found = torch.autograd.grad(total, list(learning.values()), allow_unused=True)
    return dict(zip(learning, found, strict=True))


def _list_python_functions(total: torch.Tensor) -> list[str]:
    found, seen, stack = list[str](), set[Any](), [total.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            found.append(type(node).__name__.removesuffix("Backward"))
        stack.extend(child for child, _ in node.next_functions)
    return found


@contextlib.contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Random numbers, parameters and buffers are afterwards what they were; what is compiled runs as it was written."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    weights = [(weight, weight.detach().clone()) for weight in model.parameters() if weight.device.type != "meta"]
    devices = {parameter.device.index or 0 for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)), disable_compilation(), without_hooks(model.parameters()):
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, before in weights:
                    # By value: what is written by `.data` leaves no other trace.
                    if not torch.equal(weight, before):
                        weight.copy_(before)
                for name, buffer in model.named_buffers():  # the last, for one that is expanded takes nothing
                    buffer.copy_(kept[name])
